//! Writes to the host's log. libvirt shows a hook's standard error only at debug level.

use std::io::{self, Write as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::domain::shown;
use metadata_common::printable::Printable;

/// The datagram socket of syslog and the journal (RFC 3164).
pub const SOCKET: &str = "/dev/log";

/// Most bytes of a line: RFC 3164 §4.1 limits a packet to 1024 with its header.
const LINE: usize = 960;

/// The facility `LOG_DAEMON` (syslog(3)).
const DAEMON: u8 = 3 << 3;

/// The severity in syslog's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The operator needs to act.
    Error = 3,
    /// A part of the metadata is not served.
    Warning = 4,
    /// Normal operation.
    Info = 6,
}

/// A log on standard error and in syslog. It ignores its own failures.
#[derive(Debug)]
pub struct Log {
    socket: Option<(UnixDatagram, PathBuf)>,
    guest: String,
}

impl Log {
    /// Opens a log of the hook's work for `guest`.
    #[must_use]
    pub fn new(socket: &Path, guest: &str) -> Self {
        // A reader that does not drain the socket must not block a domain.
        let opened = UnixDatagram::unbound().and_then(|own| own.set_nonblocking(true).map(|()| own));
        Self { socket: opened.ok().map(|own| (own, socket.to_owned())), guest: shown(guest) }
    }

    /// Prints a text for whoever runs the hook by hand, one message for each line. The host's log does not get it, because
    /// libvirt reports every domain again whenever it restarts.
    pub fn print(&self, text: &str) {
        for line in self.lines(text) {
            _ = writeln!(io::stderr(), "xdp-imds: {line}");
        }
    }

    fn lines(&self, text: &str) -> impl Iterator<Item = String> {
        text.lines().filter(|line| !line.is_empty()).map(|line| {
            let mut line = format!("{}: {}", self.guest, Printable(line));
            line.truncate(line.floor_char_boundary(LINE));
            line
        })
    }

    /// Logs a text, one message for each line.
    pub fn say(&self, severity: Severity, text: &str) {
        for line in self.lines(text) {
            let written = writeln!(io::stderr(), "xdp-imds: {line}");
            let sent = self.socket.as_ref().map(|(own, socket)| {
                let priority = DAEMON | severity as u8;
                let id = std::process::id();
                own.send_to(format!("<{priority}>xdp-imds-hook[{id}]: {line}").as_bytes(), socket)
            });
            drop((written, sent));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Log, Severity};
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn each_line_is_one_message_with_its_severity() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("log");
        let syslog = UnixDatagram::bind(&path).expect("a socket");
        let log = Log::new(&path, "we\nb");
        log.say(Severity::Error, &format!("one\n\n{}", "ü".repeat(1_000)));
        let id = std::process::id();
        let mut heard = [0; 4_096];
        let mut hear = || {
            let len = syslog.recv(&mut heard).expect("a message");
            String::from_utf8(heard[..len].to_vec()).expect("UTF-8")
        };
        assert_eq!(hear(), format!("<27>xdp-imds-hook[{id}]: we\\nb: one"));
        let long = hear();
        assert!(long.len() < 1_024 && long.ends_with('ü'), "{} bytes", long.len());
    }

    #[test]
    fn a_log_ignores_its_own_failures() {
        Log::new(std::path::Path::new("/nonexistent/log"), "web").say(Severity::Info, "nothing");
    }
}
