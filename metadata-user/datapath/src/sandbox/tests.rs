use super::{SandboxMode, SandboxStage};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, socket};
use rustix::process::getppid;
use rustix::thread::{CapabilitySet, capabilities};
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;

/// Runs `probe` on a new thread inside the sandbox, so that other tests stay outside.
fn behind<T: Send>(mode: SandboxMode, stages: &[SandboxStage], probe: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let inside = move || {
            stages.iter().for_each(|stage| mode.enter(*stage).expect("a fence"));
            probe()
        };
        scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn errno<T>(done: std::io::Result<T>) -> Option<i32> {
    done.err().and_then(|error| error.raw_os_error())
}

const ALL: [SandboxStage; 3] = [SandboxStage::Start, SandboxStage::Serve, SandboxStage::Work];

#[test]
fn a_thread_that_answers_guests_opens_nothing() {
    let refused = behind(SandboxMode::On, &ALL, || {
        [
            ("open to read", errno(File::open("/proc/self/maps"))),
            ("open to write", errno(File::create("/tmp/xdp-imds-never-made"))),
            ("listen", errno(TcpListener::bind("127.0.0.1:0"))),
            ("connect", errno(UnixStream::connect("/run/none"))),
            ("stat a file", errno(std::fs::metadata("/proc/self/ns/net"))),
            ("start a thread", errno(std::thread::Builder::new().spawn(|| ()))),
            ("make a directory", errno(std::fs::create_dir("/tmp/xdp-imds-never-made"))),
        ]
    });
    for (what, errno) in refused {
        assert_eq!(errno, Some(libc::EPERM), "{what}");
    }
    assert!(!std::path::Path::new("/tmp/xdp-imds-never-made").exists());
}

#[test]
fn a_thread_that_answers_guests_can_make_the_calls_of_a_turn() {
    let (said, mut heard) = std::io::pipe().map(|(heard, said)| (said, heard)).expect("a pipe");
    let outcome = behind(SandboxMode::On, &ALL, move || {
        use std::io::{Read as _, Write as _};
        let mut said = said;
        let mut bytes = vec![0; 4 << 20];
        said.write_all(b"frame")?;
        drop(said);
        let length = heard.read(&mut bytes)?;
        std::thread::sleep(std::time::Duration::from_micros(1));
        // A contained panic unwinds and prints a report.
        let fault = std::panic::catch_unwind(|| panic!("expected by this test"));
        let map: std::collections::HashMap<u8, u8> = (0..9).map(|n| (n, n)).collect();
        std::io::Result::Ok((length, fault.is_err(), map.len()))
    });
    assert_eq!(outcome.expect("reads and writes"), (5, true, 9));
}

#[test]
fn the_control_side_starts_threads_but_cannot_mount_or_open_raw_sockets() {
    let outcome = behind(SandboxMode::On, &ALL[..2], || {
        let thread = std::thread::Builder::new().spawn(|| 7).map(|thread| thread.join().ok());
        let xdp = socket(AddressFamily::from_raw(44), SocketType::RAW, None);
        let packet = socket(AddressFamily::PACKET, SocketType::RAW, None);
        let mount = rustix::mount::fsopen("tmpfs", rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC);
        let listener = TcpListener::bind("127.0.0.1:0").is_ok();
        (thread.ok().flatten(), xdp.err(), packet.err(), mount.err(), listener, getppid().is_some())
    });
    let refused = Some(Errno::PERM);
    assert_eq!(outcome, (Some(7), refused, refused, refused, true, true));
}

#[test]
fn capabilities_are_dropped_stage_by_stage() {
    let before = capabilities(None).expect("the capabilities").permitted;
    for (stages, kept) in
        [(&ALL[..1], before), (&ALL[..2], before & super::SERVE), (&ALL, before & super::WORK)]
    {
        let after = behind(SandboxMode::On, stages, || capabilities(None));
        // The strictest stage may not even read its capabilities.
        if stages.len() < ALL.len() {
            let after = after.expect("the capabilities");
            assert_eq!(
                (after.permitted, after.effective & !kept),
                (kept, CapabilitySet::empty()),
                "{stages:?}"
            );
        } else {
            assert_eq!(after.err(), Some(Errno::PERM));
        }
    }
    assert_eq!(capabilities(None).expect("the capabilities").permitted, before, "other threads keep theirs");
}

#[test]
fn the_signer_makes_files_and_packets_but_no_sockets_or_threads() {
    let room = tempfile::tempdir().expect("a directory");
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let before = capabilities(None).expect("the capabilities").permitted;
    let outcome = behind(SandboxMode::On, &[SandboxStage::Sign], || {
        let aside = room.path().join(".aside");
        let made =
            std::fs::write(&aside, "key").and_then(|()| std::fs::hard_link(&aside, room.path().join("key")));
        let listed = std::fs::read_dir(room.path()).map(Iterator::count).ok();
        let sent = rustix::net::send(&ours, b"packet", rustix::net::SendFlags::NOSIGNAL);
        let thread = errno(std::thread::Builder::new().spawn(|| ()));
        let socket = errno(UnixStream::connect("/run/none"));
        (made.is_ok(), listed, sent, thread, socket, capabilities(None).err())
    });
    let refused = Some(libc::EPERM);
    assert_eq!(outcome, (true, Some(2), Ok(6), refused, refused, Some(Errno::PERM)));
    drop(theirs);
    assert_eq!(capabilities(None).expect("the capabilities").permitted, before, "other threads keep theirs");
}

#[test]
fn off_changes_nothing_and_log_refuses_nothing() {
    for mode in [SandboxMode::Off, SandboxMode::Log] {
        assert!(behind(mode, &ALL, || File::open("/proc/self/maps").is_ok()), "{mode:?}");
    }
    let free = behind(SandboxMode::Off, &ALL, rustix::thread::no_new_privs);
    assert_eq!(free, Ok(false));
    assert_eq!(behind(SandboxMode::Log, &ALL, rustix::thread::no_new_privs), Ok(true));
}
