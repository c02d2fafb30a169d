//! Signals to processes we started.
#![expect(unsafe_code, reason = "kill(2) has no safe form in std")]

use std::io;

/// Asks a process to end (SIGTERM).
///
/// The caller knows that the id is still that of the process it means: a child it has not waited for, or
/// one whose command line it has just read.
///
/// # Errors
/// As `kill(2)`: there is no such process, or it is somebody else's.
pub fn terminate(pid: u32) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 1);
    // 0 and negative numbers would mean whole groups of processes, 1 the machine.
    let pid =
        pid.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no process of ours has that id"))?;
    // SAFETY: kill touches no memory of this process.
    let rc = unsafe { libc::kill(pid, libc::SIGTERM) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn ids_that_mean_more_than_one_process_are_refused() {
        for pid in [0, 1, u32::MAX] {
            assert!(super::terminate(pid).is_err(), "{pid}");
        }
    }
}
