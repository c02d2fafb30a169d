//! The system calls that each stage may make.
//!
//! The lists group calls by purpose. Calls that only some processors have (`open`, `poll`…) are in `older`.

use libc::c_long;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use std::collections::BTreeMap;

/// Allowed calls. A call may have conditions on its arguments, of which one must hold.
pub(super) struct Calls(BTreeMap<i64, Vec<SeccompRule>>);

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
    // musl's `abort` ends the calling thread with it.
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

/// Calls of the signer for its socket to the agent, which it has from its start.
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
    pub(super) fn work() -> Self {
        let mut calls = Self::of(&[TURN, THREAD, older::TURN]);
        calls.memory();
        calls.equal(libc::SYS_prctl, FIRST, [libc::PR_SET_TIMERSLACK as u64]);
        calls.equal(libc::SYS_bpf, FIRST, ELEMENTS);
        calls
    }

    /// The calls of the control side once the hubs exist.
    pub(super) fn serve() -> Self {
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
    pub(super) fn start() -> Self {
        let mut calls = Self::serve();
        calls.extend(MOUNTS);
        calls.equal(libc::SYS_socket, FIRST, [libc::AF_XDP as u64]);
        calls.always(libc::SYS_prlimit64);
        calls
    }

    /// The calls of the signer.
    pub(super) fn sign() -> Self {
        let mut calls = Self::of(&[TURN, THREAD, FILES, PACKETS, older::TURN, older::CONTROL]);
        calls.memory();
        calls
    }

    /// The calls that only an attack makes.
    pub(super) fn attacks() -> Self {
        Self::of(&[ATTACKS])
    }

    /// The calls that fail as if the kernel did not have them.
    pub(super) fn absent() -> Self {
        Self::of(&[&[libc::SYS_clone3]])
    }

    pub(super) fn into_rules(self) -> BTreeMap<i64, Vec<SeccompRule>> {
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
