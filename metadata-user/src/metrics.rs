//! Kernel and user counters joined, as Prometheus text.
