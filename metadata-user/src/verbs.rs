//! The verbs of the command except `serve`. Most inspect records, an agent or a node, and then exit.

pub mod check;
pub mod doctor;
pub mod exit;
pub mod explain;
pub mod export;
pub mod identity;
pub mod instances;
pub mod options;
pub mod pages;
mod record_file;
pub mod release;
pub mod top;
pub mod trace;
#[cfg(feature = "kubevirt")]
pub mod webhook;
pub mod which;
