//! Restricts the agent's system calls and capabilities in three stages, from its start to the threads that answer
//! guests.
//!
//! Guests send data to the agent, so a vulnerability in it could give a guest access to the node. Three stages limit
//! this, each a subset of the one before:
//!
//! | stage | applies to | system calls | capabilities |
//! |---|---|---|---|
//! | [`SandboxStage::Start`] | the process, from its first step | what hubs, program loading and serving need | as given |
//! | [`SandboxStage::Serve`] | the control side | no mounts, AF_XDP sockets or raised limits | those to add and remove ports |
//! | [`SandboxStage::Work`] | threads that read frames | wait, read, write, clocks, memory, map elements | `CAP_BPF` |
//!
//! The signer of identity tokens, a process of its own, enters [`SandboxStage::Sign`] alone: it reads and makes files
//! in its directory of keys and talks to the agent, and opens no socket and no process.
//!
//! A thread inherits the filters of the thread that starts it, and filters cannot be removed. This module therefore
//! changes only the calling thread. A filter on all threads at once would also have to allow what threads that enter
//! other namespaces need.
//!
//! A forbidden call fails with `EPERM` and the agent continues, so that one new call of the C library does not cost a
//! node its metadata service. A call that only an attack makes (executing a program, reading another process, loading
//! a kernel module) kills the agent, and the kernel logs it. `clone3` fails with `ENOSYS`, because a filter cannot
//! see its flags. The C library then uses `clone`, which is allowed only for threads. No memory may be mapped as
//! executable.
//!
//! For calls that are allowed with any arguments the kernel uses a bitmap and runs no filter (Linux 5.11), so the
//! packet path pays nothing.

use libc::c_long;
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};
use std::collections::BTreeMap;
use std::io;

/// Whether the sandbox is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// Forbidden calls fail.
    #[default]
    On,
    /// Everything is allowed, and the kernel logs calls that would be forbidden (audit type 1326). Use it to find out
    /// what a filter lacks.
    Log,
    /// No filter is installed and no capability is dropped.
    Off,
}

/// The stage of the agent that a sandbox applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxStage {
    /// At the start, before any resource is created.
    Start,
    /// The hubs exist.
    Serve,
    /// On a thread that answers guests.
    Work,
    /// In the process that holds the keys of identity tokens, instead of the other stages.
    Sign,
}

/// Why a sandbox could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// No filter exists for this processor architecture.
    #[error("expected x86_64 or aarch64, found {}: run with `--sandbox off` here", std::env::consts::ARCH)]
    Processor,
    /// The kernel did not accept the filter.
    #[error(
        "cannot install the system call filter: {0}; the kernel needs CONFIG_SECCOMP_FILTER, or run with \
         `--sandbox off`"
    )]
    Filter(seccompiler::Error),
    /// A limit or a capability could not be changed.
    #[error("cannot {action}: {source}; run with `--sandbox off` if this system forbids it")]
    Step {
        /// The attempted step.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl SandboxError {
    fn step(action: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Step { action, source: errno.into() }
    }
}

/// Excludes the process's memory from core dumps, and denies processes of the same user access to it: records hold
/// secrets.
///
/// # Errors
/// The kernel refused a step.
pub fn keep_memory_private() -> Result<(), SandboxError> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    setrlimit(Resource::Core, none).map_err(SandboxError::step("disable core dumps"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(SandboxError::step("deny other processes access to this process's memory"))
}

/// Capabilities to add and remove ports, and to read and write files of other users. For pods: `SYS_PTRACE` to open a
/// launcher's namespace, `DAC_READ_SEARCH` to read other users' volumes, and `DAC_OVERRIDE` to connect to launchers'
/// sockets. Without `DAC_OVERRIDE` launchers are found by their control groups.
const SERVE: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH);

/// Capabilities to read and change map elements. Kernels before 5.19 require `CAP_BPF` for every call of `bpf(2)` where
/// unprivileged `bpf(2)` is disabled.
const WORK: CapabilitySet = CapabilitySet::BPF;

/// Capability to read keys of other users.
const SIGN: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;

impl SandboxMode {
    /// Applies the stage to the calling thread and the threads it starts later.
    ///
    /// # Errors
    /// The kernel refused a step, or no filter exists for this processor. The thread may already have dropped
    /// capabilities.
    pub fn enter(self, stage: SandboxStage) -> Result<(), SandboxError> {
        if self == Self::Off {
            return Ok(());
        }
        set_no_new_privs(true).map_err(SandboxError::step("set no_new_privs"))?;
        match stage {
            _ if self == Self::Log => {}
            SandboxStage::Start => {}
            SandboxStage::Serve => keep_capabilities(SERVE)?,
            SandboxStage::Work => keep_capabilities(WORK)?,
            SandboxStage::Sign => keep_capabilities(SIGN)?,
        }
        for filter in self.filters(stage)? {
            apply_filter(&filter).map_err(SandboxError::Filter)?;
        }
        Ok(())
    }

    /// The filters of a stage, in the order of installation: the last one decides the error of a call.
    fn filters(self, stage: SandboxStage) -> Result<Vec<BpfProgram>, SandboxError> {
        let allowed = match stage {
            SandboxStage::Start => Calls::start(),
            SandboxStage::Serve => Calls::serve(),
            SandboxStage::Work => Calls::work(),
            SandboxStage::Sign => Calls::sign(),
        };
        let (allow, refuse) = (SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32));
        if self != Self::On {
            return Ok(vec![compile(allowed, SeccompAction::Log, allow)?]);
        }
        let mut filters = vec![compile(allowed, refuse, allow.clone())?];
        if matches!(stage, SandboxStage::Start | SandboxStage::Sign) {
            filters.push(compile(Calls::attacks(), allow.clone(), SeccompAction::KillProcess)?);
            filters.push(compile(Calls::absent(), allow, SeccompAction::Errno(libc::ENOSYS as u32))?);
        }
        // The signer's list does not allow to install another filter.
        if stage == SandboxStage::Sign {
            filters.rotate_left(1);
        }
        Ok(filters)
    }
}

fn compile(calls: Calls, others: SeccompAction, these: SeccompAction) -> Result<BpfProgram, SandboxError> {
    let processor: TargetArch = std::env::consts::ARCH.try_into().map_err(|_| SandboxError::Processor)?;
    let rules: BTreeMap<i64, Vec<SeccompRule>> = calls.into_rules();
    let filter = SeccompFilter::new(rules, others, these, processor);
    let program = filter.and_then(BpfProgram::try_from);
    program.map_err(|error| SandboxError::Filter(error.into()))
}

/// Drops all capabilities of the calling thread except these.
fn keep_capabilities(kept: CapabilitySet) -> Result<(), SandboxError> {
    let refused = SandboxError::step;
    let had = capabilities(None).map_err(refused("read the capabilities"))?;
    let sets = CapabilitySets {
        effective: had.effective & kept,
        permitted: had.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(refused("drop capabilities"))
}

// The system calls that each stage may make.
//
// The lists group calls by purpose. Calls that only some processors have (`open`, `poll`…) are in `older`.

/// Allowed calls. A call may have conditions on its arguments, of which one must hold.
struct Calls(BTreeMap<i64, Vec<SeccompRule>>);

/// Calls for a worker's turn: waiting, reading, writing, clocks, locks, randomness.
const TURN: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_ppoll,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getsockopt,
    libc::SYS_getrandom,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_membarrier,
    libc::SYS_restart_syscall,
];

/// Calls for memory, and for the start and end of a thread.
const THREAD: &[c_long] = &[
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    // musl's `abort` uses this call to send SIGABRT to its own thread.
    libc::SYS_tkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Calls for files: records, state, the audit log, `/proc`, pins.
const FILES: &[c_long] = &[
    libc::SYS_openat,
    // Opens files in pods' volumes, so that no symbolic link leads out of them.
    libc::SYS_openat2,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    // The access control list of the control socket.
    libc::SYS_setxattr,
    libc::SYS_getdents64,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_copy_file_range,
    libc::SYS_getcwd,
    libc::SYS_umask,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_ioctl,
];

/// Calls for the event loop of the control side.
const EVENTS: &[c_long] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    libc::SYS_pipe2,
    libc::SYS_pselect6,
    libc::SYS_signalfd4,
];

/// Calls for metrics, control and takeover sockets, sinks, netlink and the service manager; see [`FAMILIES`].
const SOCKETS: &[c_long] = &[
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    // The C library's resolver asks for both address families at once with it.
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];

/// Calls of the signer for its socket to the agent, which it has from the start.
const PACKETS: &[c_long] = &[libc::SYS_recvfrom, libc::SYS_sendto, libc::SYS_getppid, libc::SYS_clone3];

/// Socket families that may be opened at any time.
const FAMILIES: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Calls for the process, its threads, and the kernel programs.
const PROCESS: &[c_long] = &[
    libc::SYS_bpf,
    libc::SYS_seccomp,
    libc::SYS_prctl,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_pidfd_open,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrusage,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    // A separate filter answers it with ENOSYS.
    libc::SYS_clone3,
];

/// Only for the start: a private bpffs, mounted nowhere.
const MOUNTS: &[c_long] = &[libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount];

/// Calls that only an attack makes.
const ATTACKS: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_open_by_handle_at,
    libc::SYS_io_uring_setup,
    libc::SYS_userfaultfd,
    libc::SYS_unshare,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
];

/// Older calls that x86_64 still has and its C library uses.
#[cfg(target_arch = "x86_64")]
mod older {
    use libc::c_long;

    pub(super) const TURN: &[c_long] = &[libc::SYS_poll, libc::SYS_time];
    pub(super) const CONTROL: &[c_long] = &[
        libc::SYS_open,
        libc::SYS_stat,
        libc::SYS_lstat,
        libc::SYS_access,
        libc::SYS_rename,
        libc::SYS_unlink,
        libc::SYS_mkdir,
        libc::SYS_rmdir,
        libc::SYS_chmod,
        libc::SYS_link,
        libc::SYS_readlink,
        libc::SYS_dup2,
        libc::SYS_pipe,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_create,
        libc::SYS_select,
        libc::SYS_arch_prctl,
    ];
}

#[cfg(not(target_arch = "x86_64"))]
mod older {
    use libc::c_long;

    pub(super) const TURN: &[c_long] = &[];
    pub(super) const CONTROL: &[c_long] = &[];
}

/// Commands of `bpf(2)` that look up, update and delete elements of an open map (uapi/linux/bpf.h).
const ELEMENTS: [u64; 3] = [1, 2, 3];

/// The index of an argument.
const FIRST: u8 = 0;
const SECOND: u8 = 1;
const THIRD: u8 = 2;

impl Calls {
    /// The calls of a thread that answers guests.
    fn work() -> Self {
        let mut calls = Self::of(&[TURN, THREAD, older::TURN]);
        calls.memory();
        calls.equal(libc::SYS_prctl, FIRST, [libc::PR_SET_TIMERSLACK as u64]);
        calls.equal(libc::SYS_bpf, FIRST, ELEMENTS);
        calls
    }

    /// The calls of the control side once the hubs exist.
    fn serve() -> Self {
        let mut calls =
            Self::of(&[TURN, THREAD, FILES, EVENTS, SOCKETS, PROCESS, older::TURN, older::CONTROL]);
        calls.memory();
        calls.equal(libc::SYS_socket, FIRST, FAMILIES.iter().map(|family| *family as u64));
        // Threads only, no processes.
        let thread = libc::CLONE_THREAD as u64;
        calls.condition(libc::SYS_clone, FIRST, SeccompCmpOp::MaskedEq(thread), thread);
        calls.equal(libc::SYS_setns, SECOND, [libc::CLONE_NEWNET as u64]);
        // Limits may be read but not set.
        calls.wide_zero(libc::SYS_prlimit64, THIRD);
        calls
    }

    /// The calls of [`serve`](Self::serve), and those that create hubs.
    fn start() -> Self {
        let mut calls = Self::serve();
        calls.extend(MOUNTS);
        calls.equal(libc::SYS_socket, FIRST, [libc::AF_XDP as u64]);
        calls.always(libc::SYS_prlimit64);
        calls
    }

    /// The calls of the signer.
    fn sign() -> Self {
        let mut calls = Self::of(&[TURN, THREAD, FILES, PACKETS, older::TURN, older::CONTROL]);
        calls.memory();
        calls
    }

    /// The calls that only an attack makes.
    fn attacks() -> Self {
        Self::of(&[ATTACKS])
    }

    /// The calls that fail as if the kernel did not have them.
    fn absent() -> Self {
        Self::of(&[&[libc::SYS_clone3]])
    }

    fn into_rules(self) -> BTreeMap<i64, Vec<SeccompRule>> {
        self.0
    }

    fn of(lists: &[&[c_long]]) -> Self {
        let mut calls = Self(BTreeMap::new());
        lists.iter().for_each(|list| calls.extend(list));
        calls
    }

    fn extend(&mut self, list: &[c_long]) {
        list.iter().for_each(|call| self.always(*call));
    }

    fn always(&mut self, call: c_long) {
        self.0.insert(call, Vec::new());
    }

    /// Allows memory mappings that are not executable.
    fn memory(&mut self) {
        let run = libc::PROT_EXEC as u64;
        for call in [libc::SYS_mmap, libc::SYS_mprotect] {
            self.condition(call, THIRD, SeccompCmpOp::MaskedEq(run), 0);
        }
    }

    /// Allows a call whose 32-bit argument is one of these values.
    fn equal(&mut self, call: c_long, argument: u8, values: impl IntoIterator<Item = u64>) {
        for value in values {
            self.condition(call, argument, SeccompCmpOp::Eq, value);
        }
    }

    /// Allows a call whose pointer argument is null.
    fn wide_zero(&mut self, call: c_long, argument: u8) {
        self.rule(call, SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0));
    }

    fn condition(&mut self, call: c_long, argument: u8, op: SeccompCmpOp, value: u64) {
        self.rule(call, SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value));
    }

    /// Adds a rule; a call is allowed if one of its rules holds. A condition fails to build only for an argument
    /// beyond the sixth, and a rule only without conditions. The call then stays forbidden.
    fn rule(&mut self, call: c_long, condition: Result<SeccompCondition, seccompiler::BackendError>) {
        if let Ok(rule) = condition.and_then(|condition| SeccompRule::new(vec![condition])) {
            self.0.entry(call).or_default().push(rule);
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            capabilities(None).expect("the capabilities").permitted,
            before,
            "other threads keep theirs"
        );
    }

    #[test]
    fn the_signer_makes_files_and_packets_but_no_sockets_or_threads() {
        let room = tempfile::tempdir().expect("a directory");
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let before = capabilities(None).expect("the capabilities").permitted;
        let outcome = behind(SandboxMode::On, &[SandboxStage::Sign], || {
            let aside = room.path().join(".aside");
            let made = std::fs::write(&aside, "key")
                .and_then(|()| std::fs::hard_link(&aside, room.path().join("key")));
            let listed = std::fs::read_dir(room.path()).map(Iterator::count).ok();
            let sent = rustix::net::send(&ours, b"packet", rustix::net::SendFlags::NOSIGNAL);
            let thread = errno(std::thread::Builder::new().spawn(|| ()));
            let socket = errno(UnixStream::connect("/run/none"));
            (made.is_ok(), listed, sent, thread, socket, capabilities(None).err())
        });
        let refused = Some(libc::EPERM);
        assert_eq!(outcome, (true, Some(2), Ok(6), refused, refused, Some(Errno::PERM)));
        drop(theirs);
        assert_eq!(
            capabilities(None).expect("the capabilities").permitted,
            before,
            "other threads keep theirs"
        );
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
}
