//! Sends signals to child processes, and stops one thread of a process while the others run.
#![expect(unsafe_code, reason = "kill(2) and ptrace(2) have no safe form in std")]

use std::io;
use std::path::Path;
use std::process::Command;

use crate::netns::run;

/// Writes a script that can be executed.
///
/// A child process writes the file. If this process wrote it, another thread's child could inherit the open descriptor.
/// The script's execution would then fail with ETXTBSY.
///
/// # Errors
/// When the file cannot be written.
pub fn write_script(path: &Path, text: &str) -> anyhow::Result<()> {
    run(Command::new("sh")
        .args(["-ec", "printf %s \"$2\" > \"$1\" && chmod 755 \"$1\"", "sh"])
        .arg(path)
        .arg(text))
    .map(drop)
}

/// Sends SIGTERM to a process.
///
/// The caller must know that the id still belongs to the intended process: a child it has not waited for, or a
/// process whose command line it has just read.
///
/// # Errors
/// Like `kill(2)`: there is no such process, or it belongs to another user.
pub fn terminate(pid: u32) -> io::Result<()> {
    signal(pid, libc::SIGTERM)
}

/// Sends SIGHUP to a process, with the same condition as [`terminate`].
///
/// # Errors
/// Like [`terminate`].
pub fn hang_up(pid: u32) -> io::Result<()> {
    signal(pid, libc::SIGHUP)
}

/// Sends a signal to a process, with the same condition as [`terminate`].
///
/// # Errors
/// Like [`terminate`].
pub fn signal(pid: u32, signal: libc::c_int) -> io::Result<()> {
    // 0 and negative numbers address process groups, 1 is init.
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 1);
    let pid =
        pid.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no process of ours has that id"))?;
    // SAFETY: kill touches no memory of this process.
    let rc = unsafe { libc::kill(pid, signal) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// One stopped thread of a process whose other threads run. Dropping this value continues the thread. Only the thread
/// that created the value may drop it.
#[derive(Debug)]
pub struct Stopped {
    thread: libc::pid_t,
}

impl Stopped {
    /// Stops the thread of this name in a process.
    ///
    /// # Errors
    /// Fails if there is no such thread, or the kernel refuses to trace it.
    pub fn thread(pid: u32, name: &str) -> io::Result<Self> {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task"))?.filter_map(Result::ok);
        let called = |path: &Path| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        let mut found = threads.map(|entry| entry.path()).filter(|path| called(path).trim_end() == name);
        let number = found.next().and_then(|path| path.file_name()?.to_str()?.parse().ok());
        let thread =
            number.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no thread {name}")))?;
        trace(libc::PTRACE_SEIZE, thread)?;
        let stopped = Self { thread };
        trace(libc::PTRACE_INTERRUPT, thread)?;
        let mut status = 0;
        // SAFETY: `status` outlives the call, which writes one int to it.
        let rc = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        if rc == thread { Ok(stopped) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Err(error) = trace(libc::PTRACE_DETACH, self.thread) {
            eprintln!("thread {} stays stopped until this process ends: {error}", self.thread);
        }
    }
}

/// The type of a request of ptrace(2), on which C libraries differ.
#[cfg(target_env = "musl")]
type Request = libc::c_int;
#[cfg(not(target_env = "musl"))]
type Request = libc::c_uint;

fn trace(request: Request, thread: libc::pid_t) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: these requests take neither address nor data, and touch no memory of this process.
    let rc = unsafe { libc::ptrace(request, thread, none, none) };
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
