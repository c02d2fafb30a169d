//! What guests are told: from a VM's record to the answer to one request.
//!
//! [`record`] is what an operator writes, [`dialect`] turns it into paths and responses, [`store`] finds them by slot, host,
//! path and method, [`http`] reads requests and writes answers. [`token`], [`mailbox`] and [`sink`] are what a guest has
//! and leaves beyond that; [`account`] limits what one VM makes the agent keep.
//!
//! No I/O, no clock, no async runtime: time is an argument, and files, sockets and queues are somebody else's.

pub mod account;
pub mod dialect;
pub mod http;
pub mod mailbox;
pub mod record;
pub mod sink;
pub mod source;
pub mod store;
pub mod token;
