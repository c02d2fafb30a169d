//! HTTP, records and what they become, in memory.

mod http_limits;
mod http_rules;
mod properties;
mod store_under_threads;
mod vectors;
