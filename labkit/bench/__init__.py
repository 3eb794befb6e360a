"""Measurement: workloads, the machine they ran on, peers, and the record that all of it goes into."""
