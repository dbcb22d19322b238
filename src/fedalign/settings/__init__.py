"""How settings are read: notation, types, options against signatures, and modules of the user's own."""
