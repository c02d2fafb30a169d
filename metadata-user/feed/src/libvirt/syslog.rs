//! Lines for the host's log: libvirt shows what a hook writes to standard error only when it debugs.

use std::io::{self, Write as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use super::domain::shown;

/// Where syslog and the journal listen (RFC 3164 over a datagram socket).
pub const SOCKET: &str = "/dev/log";

/// Longest line in octets: RFC 3164 §4.1 takes 1024 with what is before it.
const LINE: usize = 960;

/// `LOG_DAEMON` (syslog(3)).
const DAEMON: u8 = 3 << 3;

/// How bad it is, in syslog's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Something is to be done.
    Error = 3,
    /// Something is not as it should be.
    Warning = 4,
    /// For the record.
    Info = 6,
}

/// A log on standard error and in syslog. Nothing that fails here matters to anybody.
#[derive(Debug)]
pub struct Log {
    socket: Option<(UnixDatagram, PathBuf)>,
    guest: String,
}

impl Log {
    /// A log of what is done for `guest`.
    #[must_use]
    pub fn new(socket: &Path, guest: &str) -> Self {
        // Not blocking: a log that does not listen must not hold up a domain.
        let opened = UnixDatagram::unbound().and_then(|own| own.set_nonblocking(true).map(|()| own));
        Self { socket: opened.ok().map(|own| (own, socket.to_owned())), guest: shown(guest) }
    }

    /// Says something, each of its lines by itself.
    pub fn say(&self, severity: Severity, text: &str) {
        for line in text.lines().filter(|line| !line.is_empty()) {
            let mut line = format!("{}: {line}", self.guest);
            line.truncate(line.floor_char_boundary(LINE));
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
        assert!(long.len() < 1_024 && long.ends_with('ü'), "{} octets", long.len());
    }

    #[test]
    fn a_log_that_nobody_keeps_is_no_trouble() {
        Log::new(std::path::Path::new("/nonexistent/log"), "web").say(Severity::Info, "nothing");
    }
}
