//! What the service manager hears: that guests are served, and that this is over (sd_notify(3)).

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Names the socket, in the environment of a service of `Type=notify`.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Guests are served.
pub(super) fn ready() {
    tell("READY=1");
}

/// The agent is about to end.
pub(super) fn stopping() {
    tell("STOPPING=1");
}

fn tell(state: &str) {
    if let Some(socket) = env::var_os(SOCKET)
        && let Err(error) = send(&socket, state)
    {
        tracing::warn!("the service manager is not told {state}: {error}");
    }
}

fn send(socket: &OsString, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::send;
    use std::ffi::OsString;
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    #[test]
    fn a_state_reaches_sockets_with_a_path_and_without() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("notify");
        let name = format!("xdp-imds-notify-{}", std::process::id());
        let abstractly = SocketAddr::from_abstract_name(&name).expect("an address");
        let cases: [(OsString, _); 2] = [
            (path.clone().into(), UnixDatagram::bind(&path).expect("a socket")),
            (format!("@{name}").into(), UnixDatagram::bind_addr(&abstractly).expect("a socket")),
        ];
        for (address, socket) in cases {
            send(&address, "READY=1").expect("told");
            let mut heard = [0; 32];
            let length = socket.recv(&mut heard).expect("heard");
            assert_eq!(&heard[..length], b"READY=1", "{}", address.display());
        }
        assert!(send(&"relative/nowhere".into(), "READY=1").is_err());
    }
}
