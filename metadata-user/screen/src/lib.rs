//! The terminal view of a node, as `xdp-imds top` shows it.
//!
//! ```text
//!  agent ── Top, VmPage (metadata_control::top) ──► Screen ── draw ──► Buffer ──► terminal | plain text
//!                                    keys ──────────►│
//! ```
//!
//! [`Screen`] is the state: the last documents, what is shown, and what to ask next. [`draw::draw`] makes cells of it,
//! and tests compare these. Only [`terminal`] knows a real terminal, and only [`fetch()`] the agent.

pub mod draw;
mod fetch;
pub mod figures;
mod screen;
pub mod terminal;
mod terminal_style;
#[cfg(test)]
mod tests;

pub use draw::plain;
pub use fetch::fetch;
pub use screen::KeyAction;
pub use screen::{Documents, LISTED, Screen, ScreenContent, ViewQuery};
pub use terminal_style::TerminalStyle;
