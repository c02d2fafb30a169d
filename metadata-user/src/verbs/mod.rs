//! The verbs of the command, but for `serve` itself: each looks at records, at an agent or at a node, and ends.

pub mod check;
pub mod doctor;
pub mod explain;
pub mod export;
pub mod instances;
pub mod options;
pub mod trace;
#[cfg(feature = "kubevirt")]
pub mod webhook;
pub mod which;
