//! An agent takes over the ports of another agent under load, and no guest notices. If either agent dies, guests are
//! served again after the next start at the latest.

mod connections;
mod crowd;
mod failures;
mod node;
mod talk;
