"""Parse, call one room, print."""
