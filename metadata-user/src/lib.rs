//! xdp-imds: the instance metadata service of a hypervisor node.
//!
//! The path of one request runs through the modules in this order: [`steer`] (kernel side, loaded and
//! filled) → [`afxdp`] → [`link`] → [`stack`] → [`serve`] → [`http`] → [`store`], and back by the hub
//! tap. [`feed`] → [`record`] → [`dialect`] → [`store`] is the way of a VM record. [`worker`] owns the
//! thread, the clock and the waiting; nothing from `link` inwards knows a file descriptor or reads a
//! clock.

pub mod agent;
pub mod config;
pub mod delivery;
pub mod metrics;
pub mod recent;
pub mod verbs;
