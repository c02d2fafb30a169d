//! xdp-imds: the instance metadata service of a hypervisor node.
//!
//! The path of one request runs through the crates in this order: `metadata-steer` (kernel side, loaded and filled) →
//! `metadata-datapath` (AF_XDP, frames, TCP) → `metadata-serve` (one connection's exchange) → `metadata-content` (the
//! answer). The answer returns through the hub tap. A VM's record comes from `metadata-feed` and is rendered by
//! `metadata-content`.
//!
//! This crate holds the [`agent`], which starts and connects them, its configuration and metrics, the [`delivery`] of
//! messages from guests to sinks, the issuer of [`identity`] tokens, and the [`verbs`] of the command.

pub mod agent;
pub mod config;
pub mod delivery;
mod http_connection;
pub mod identity;
pub mod logging;
pub mod metrics;
pub mod output;
pub mod recent;
pub mod verbs;
