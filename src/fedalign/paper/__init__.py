"""The paper's figures: which experiments they are, running them, and the page that tells which claims hold."""
