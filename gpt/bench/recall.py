def configure(p): pass
