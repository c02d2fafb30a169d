//! ARP, neighbour discovery, IP and TCP for one port: no clock, no file descriptor.

mod seam;

pub use seam::{Connection, Exchange, Service, Step, Transmit};
