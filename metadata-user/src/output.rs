//! Standard output and standard error of the verbs.
//!
//! Nothing else in this crate writes there (the test `house` checks it), so no escape sequence that somebody put into a
//! record, a request or an answer reaches a terminal. Printers show each value by
//! [`Printable`](metadata_common::printable::Printable), which escapes line feeds too.
//!
//! The reader of a pipe may have exited, as `head` does. Then a verb ends without a message ([`is_closed`]).

use std::fmt::Display;
use std::io::{self, IsTerminal as _, Stderr, StdoutLock, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use metadata_common::printable::{PrintableWriter, printable_lines};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::logging;

/// True once nobody reads what this process writes.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// A stream that notes if its reader has gone, and names itself in other errors.
#[derive(Debug)]
pub struct TrackedStream<W>(W, &'static str);

fn noted<T>(name: &str, done: io::Result<T>) -> io::Result<T> {
    done.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => {
            CLOSED.store(true, Ordering::Relaxed);
            error
        }
        // Whoever writes tries again.
        io::ErrorKind::Interrupted => error,
        kind => io::Error::new(kind, format!("cannot write to {name}: {error}")),
    })
}

impl<W: Write> Write for TrackedStream<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        noted(self.1, self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        noted(self.1, self.0.flush())
    }
}

/// Standard output, locked.
#[must_use]
pub fn stdout() -> PrintableWriter<TrackedStream<StdoutLock<'static>>> {
    PrintableWriter::new(TrackedStream(io::stdout().lock(), "standard output"))
}

/// Standard error.
#[must_use]
pub fn stderr() -> PrintableWriter<TrackedStream<Stderr>> {
    PrintableWriter::new(TrackedStream(io::stderr(), "standard error"))
}

/// True once standard output or standard error was written to after its reader had gone.
#[must_use]
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// True if the reader of standard output has gone. Looks, without writing.
#[must_use]
pub fn has_no_reader() -> bool {
    let stdout = io::stdout();
    let mut asked = [PollFd::new(&stdout, PollFlags::empty())];
    // The kernel reports the end of a reader even if nothing is asked for.
    let polled = poll(&mut asked, Some(&Timespec::default()));
    let is_gone = polled.is_ok() && asked[0].revents().contains(PollFlags::ERR);
    if is_gone {
        CLOSED.store(true, Ordering::Relaxed);
    }
    is_gone
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

/// An error with its causes. A cause that the text already contains is left out.
#[must_use]
pub fn described(error: &anyhow::Error) -> String {
    let causes = error.chain().map(ToString::to_string);
    let said =
        causes.reduce(|said, cause| if said.contains(&cause) { said } else { format!("{said}: {cause}") });
    said.unwrap_or_default()
}
