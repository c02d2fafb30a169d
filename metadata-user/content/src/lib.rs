//! The content of the metadata service: turns a VM's record into the answer to one request.
//!
//! An operator or a feed writes the [`record`]. [`dialect`] renders it into paths and responses. [`store`] finds a
//! response by slot, host, path and method. [`http`] parses requests and builds responses. [`token`] issues and checks
//! IMDSv2 tokens, and [`identity`] those that others verify. [`mailbox`] holds what a guest writes
//! and what the host announces, [`sink`] forwards messages, and [`account`] limits how much memory one VM can make the
//! agent hold. [`upstream`] has the answers of another metadata service, for VMs of a platform that has one.
//!
//! This crate does no I/O, reads no clock and has no async runtime. The caller passes the time in and owns all files,
//! sockets and queues.

pub mod account;
// Its table of dialects also defines the names in `record`.
#[macro_use]
pub mod dialect;
pub mod http;
pub mod identity;
pub mod mailbox;
pub mod on_demand;
pub mod parser;
pub mod record;
pub mod sink;
pub mod source;
pub mod store;
pub mod token;
pub mod upstream;
