"""Rules of inclusion: who offers (on the client), who is admitted with which weight (on the server)."""
