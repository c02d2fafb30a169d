//! The agent as a process: its start, reload and end, takeovers, what it keeps, and what it may do.

mod faults;
mod least_privilege;
mod outlives_the_agent;
mod registering;
mod reload;
mod secrets;
mod takeover;
mod token_key;
