"""The contribution ledger: what every client gave in every round and what it got, in a file that shows changes."""
