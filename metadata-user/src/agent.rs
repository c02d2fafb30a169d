//! The agent's control side: joins feeds, store and steering.
//!
//! An event (a record, a link that appeared or vanished, a timer) marks ("touches") the ports that it may affect. The
//! node (`node`) brings touched ports, a few at a time, from their present state to the state in the plan (`plan`).
//! Ports and responses change in no other way.

mod control;
mod documents;
mod drain;
mod endpoint;
mod event_sources;
mod feeds;
mod handover;
mod health;
mod node;
mod plan;
pub mod preflight;
mod registration_store;
mod reload;
mod service_manager;
mod slots;
mod snapshots;
mod start;
mod state;

pub(crate) use endpoint::SocketError;
pub use health::{Health, HealthProblem};
pub use reload::ConfigSource;
pub(crate) use start::locked_memory;
pub use start::{TakeoverMode, serve};
pub use state::{BackgroundTasks, NodeState};
