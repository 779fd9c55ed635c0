"""What of a machine or a cluster works for us, one check per part; `clawhpc.doctor` puts them together."""
