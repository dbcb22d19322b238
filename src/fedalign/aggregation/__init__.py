"""How the server combines the clients' updates."""
