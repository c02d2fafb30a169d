//! Standard output and standard error of the verbs.
//!
//! Nothing else in this crate writes there (the test `house` checks it), so no escape sequence that somebody put into a
//! record, a request or an answer reaches a terminal. Printers show each value by
//! [`Printable`](metadata_base::printable::Printable), which escapes line feeds too.

use std::fmt::Display;
use std::io::{self, IsTerminal as _, Stderr, StdoutLock, Write as _};

use metadata_base::printable::{PrintableWriter, printable_lines};

use crate::logging;

/// Standard output, locked.
#[must_use]
pub fn stdout() -> PrintableWriter<StdoutLock<'static>> {
    PrintableWriter::new(io::stdout().lock())
}

/// Standard error.
#[must_use]
pub fn stderr() -> PrintableWriter<Stderr> {
    PrintableWriter::new(io::stderr())
}

/// True if standard output is a terminal.
#[must_use]
pub fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// True if standard error is a terminal.
#[must_use]
pub fn is_error_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Writes a message of the command to standard error. Its further lines are indented, so that none looks like another
/// message.
pub fn report(message: impl Display) {
    let text = printable_lines(message).replace('\n', "\n    ");
    // Without standard error there is nobody to tell.
    _ = writeln!(io::stderr(), "{}xdp-imds: {text}", logging::error_prefix());
}
