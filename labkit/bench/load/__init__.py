"""Load on a server: what is asked and when, the clients, the measurement, and the soak."""
