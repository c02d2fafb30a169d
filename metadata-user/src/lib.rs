//! xdp-imds: the instance metadata service of a hypervisor node.
//!
//! The path of one request runs through the crates in this order: `metadata-steer` (kernel side, loaded and filled) →
//! `metadata-datapath` (AF_XDP, frames, TCP) → [`service`] (one connection's exchange) → `metadata-content` (the answer).
//! The answer returns through the hub tap. A VM's record comes from `metadata-feed` and is rendered by
//! `metadata-content`.
//!
//! This crate holds the [`agent`], which starts and connects them, its configuration and metrics, the HTTP [`service`]
//! of guests, the [`delivery`] of their messages to sinks, the issuer of [`identity`] tokens, and the [`verbs`] of the
//! command.

pub mod agent;
pub mod config;
pub mod delivery;
mod http_connection;
pub mod identity;
pub mod logging;
pub mod metrics;
pub mod output;
pub mod service;
pub mod verbs;

/// The version and the build id, as `xdp-imds --version` prints them after the program's name.
///
/// The build id is a hash over the agent's sources (`build.rs`). Programs that test the agent compare it with their own,
/// and refuse an agent that was built before the last change of its sources.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (build ", env!("XDP_IMDS_BUILD_ID"), ")");
