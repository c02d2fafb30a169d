//! Which system calls each stage makes.
//!
//! The lists name calls by what they are for. What only some processors have (`open`, `poll`…) is with those.

use libc::c_long;
use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use std::collections::BTreeMap;

/// Calls, some with conditions on their arguments of which one must hold.
pub(super) struct Calls(BTreeMap<i64, Vec<SeccompRule>>);

/// A turn: waiting, reading, writing, clocks, locks, randomness.
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

/// Memory, and the life of a thread.
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
    // How musl's `abort` ends the thread it is called on.
    libc::SYS_tkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Files: records, state, the audit log, `/proc`, pins.
const FILES: &[c_long] = &[
    libc::SYS_openat,
    // Volumes of pods, out of which no link is to lead.
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

/// What the runtime of the control side waits with.
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

/// Metrics, control and takeover sockets, sinks, netlink, the service manager. Which families, see [`FAMILIES`].
const SOCKETS: &[c_long] = &[
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    // How the C library's resolver asks for both families at once.
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];

/// Families of sockets that are opened all the agent's life.
const FAMILIES: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// The process, its threads, and the kernel side.
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
    libc::SYS_sched_setaffinity,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    // Refused with ENOSYS by a filter of its own.
    libc::SYS_clone3,
];

/// What only the start takes: a bpffs of one's own, mounted nowhere.
const MOUNTS: &[c_long] = &[libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount];

/// What only an attack does.
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

/// The older forms that x86_64 has kept, and its C library uses.
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

/// Commands of `bpf(2)` that look up, change and remove elements of a map that is open (uapi/linux/bpf.h).
const ELEMENTS: [u64; 3] = [1, 2, 3];

/// Which place an argument has.
const FIRST: u8 = 0;
const SECOND: u8 = 1;
const THIRD: u8 = 2;

impl Calls {
    /// What a thread that answers guests does.
    pub(super) fn work() -> Self {
        let mut calls = Self::of(&[TURN, THREAD, older::TURN]);
        calls.memory();
        calls.equal(libc::SYS_prctl, FIRST, [libc::PR_SET_TIMERSLACK as u64]);
        calls.equal(libc::SYS_bpf, FIRST, ELEMENTS);
        calls
    }

    /// What the control side does once the hubs are there.
    pub(super) fn serve() -> Self {
        let mut calls =
            Self::of(&[TURN, THREAD, FILES, EVENTS, SOCKETS, PROCESS, older::TURN, older::CONTROL]);
        calls.memory();
        calls.equal(libc::SYS_socket, FIRST, FAMILIES.iter().map(|family| *family as u64));
        // Threads, and no processes.
        let thread = libc::CLONE_THREAD as u64;
        calls.condition(libc::SYS_clone, FIRST, SeccompCmpOp::MaskedEq(thread), thread);
        calls.equal(libc::SYS_setns, SECOND, [libc::CLONE_NEWNET as u64]);
        // Read, not raised.
        calls.wide_zero(libc::SYS_prlimit64, THIRD);
        calls
    }

    /// The same, and what making hubs takes.
    pub(super) fn start() -> Self {
        let mut calls = Self::serve();
        calls.extend(MOUNTS);
        calls.equal(libc::SYS_socket, FIRST, [libc::AF_XDP as u64]);
        calls.always(libc::SYS_prlimit64);
        calls
    }

    /// What only an attack does.
    pub(super) fn attacks() -> Self {
        Self::of(&[ATTACKS])
    }

    /// What is to look as if the kernel did not have it.
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

    /// Memory that is not to be run.
    fn memory(&mut self) {
        let run = libc::PROT_EXEC as u64;
        for call in [libc::SYS_mmap, libc::SYS_mprotect] {
            self.condition(call, THIRD, SeccompCmpOp::MaskedEq(run), 0);
        }
    }

    /// Allows a call whose argument (32 bits) is one of these.
    fn equal(&mut self, call: c_long, argument: u8, values: impl IntoIterator<Item = u64>) {
        for value in values {
            self.condition(call, argument, SeccompCmpOp::Eq, value);
        }
    }

    /// Allows a call whose pointer is null.
    fn wide_zero(&mut self, call: c_long, argument: u8) {
        self.rule(call, SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0));
    }

    fn condition(&mut self, call: c_long, argument: u8, op: SeccompCmpOp, value: u64) {
        self.rule(call, SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value));
    }

    /// A call is allowed when one of its rules holds. A condition is refused only for an argument beyond the sixth,
    /// and a rule only without conditions: then the call stays forbidden.
    fn rule(&mut self, call: c_long, condition: Result<SeccompCondition, seccompiler::BackendError>) {
        if let Ok(rule) = condition.and_then(|condition| SeccompRule::new(vec![condition])) {
            self.0.entry(call).or_default().push(rule);
        }
    }
}
