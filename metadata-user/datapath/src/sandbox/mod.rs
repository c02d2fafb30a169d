//! What the agent may ask of the kernel: less and less, from its start to the answering of guests.
//!
//! An agent that guests talk to is the way from a guest to the node, should there be a fault in it. Three fences
//! stand on that way, each smaller than the one around it:
//!
//! | stage | whose | system calls | capabilities |
//! |---|---|---|---|
//! | [`Stage::Start`] | the process, from its first step | what making hubs, loading programs and serving take | as given |
//! | [`Stage::Serve`] | the control side, once the hubs are there | no mounting, no AF_XDP sockets, no raising of limits | those by which ports come and go |
//! | [`Stage::Work`] | the threads that read what guests send | a turn's: wait, read, write, clocks, memory, the element calls of `bpf(2)` | `CAP_BPF` |
//!
//! A thread inherits the fence of the one that starts it, and none can be taken down again, so nothing here
//! touches another thread: a filter that is laid on all threads at once would have to fit those that visit a
//! namespace as well.
//!
//! What is not allowed fails with `EPERM`, and the agent goes on: one call that a new C library makes must not
//! cost a node its metadata service. What nothing but an attack makes (running a program, looking into another
//! process, loading a kernel module) ends the agent on the spot, which the kernel logs. `clone3` is told not to
//! exist (`ENOSYS`), because its flags are out of a filter's sight, and the C library then uses `clone`, of which
//! only threads are allowed. Memory is never both written and run.
//!
//! Filters are looked at by kernel bitmaps for calls that are allowed whatever their arguments, so the packet
//! path pays nothing for them (Linux 5.11).

mod calls;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, apply_filter};
use std::collections::BTreeMap;
use std::io;

use calls::Calls;

/// Whether the fences stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// What is not allowed fails.
    #[default]
    On,
    /// Everything is allowed, and what should not be is in the kernel's log (audit type 1326): to find out what a
    /// filter lacks.
    Log,
    /// No filter, and no capability is given up.
    Off,
}

/// How far the agent has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// At the start, before anything is made.
    Start,
    /// The hubs are there.
    Serve,
    /// On a thread that answers guests.
    Work,
}

/// Why a fence does not stand.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// There is no filter for this kind of processor.
    #[error("expected x86_64 or aarch64, found {}: run with `--sandbox off` here", std::env::consts::ARCH)]
    Processor,
    /// The kernel takes no filter.
    #[error(
        "cannot install the system call filter: {0}; the kernel needs CONFIG_SECCOMP_FILTER, or run with \
         `--sandbox off`"
    )]
    Filter(seccompiler::Error),
    /// A limit or a capability cannot be changed.
    #[error("cannot {action}: {source}; run with `--sandbox off` if this system forbids it")]
    Step {
        /// What was tried.
        action: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl SandboxError {
    fn step(action: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Step { action, source: errno.into() }
    }
}

/// Keeps what is in memory out of core dumps, and from processes of the same user: records hold secrets.
///
/// # Errors
/// When the kernel refuses.
pub fn keep_memory_private() -> Result<(), SandboxError> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    setrlimit(Resource::Core, none).map_err(SandboxError::step("forbid core dumps"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(SandboxError::step("keep other processes from this one's memory"))
}

/// By which ports come and go, and files of other users are read and written. Of pods: `SYS_PTRACE` leads to the
/// namespace of a launcher, `DAC_READ_SEARCH` to volumes that are another user's, and `DAC_OVERRIDE`, without which
/// launchers are found by their control groups, connects to their sockets.
const SERVE: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH);

/// Kernels before 5.19 ask for it with every call of `bpf(2)`, where unprivileged users have none.
const WORK: CapabilitySet = CapabilitySet::BPF;

impl Mode {
    /// Fences the calling thread in, and those it will start.
    ///
    /// # Errors
    /// The kernel refuses, or there is no filter for this processor. The thread may have given up capabilities then.
    pub fn enter(self, stage: Stage) -> Result<(), SandboxError> {
        if self == Self::Off {
            return Ok(());
        }
        set_no_new_privs(true).map_err(SandboxError::step("give up gaining privileges"))?;
        match stage {
            _ if self == Self::Log => {}
            Stage::Start => {}
            Stage::Serve => keep_capabilities(SERVE)?,
            Stage::Work => keep_capabilities(WORK)?,
        }
        for filter in self.filters(stage)? {
            apply_filter(&filter).map_err(SandboxError::Filter)?;
        }
        Ok(())
    }

    /// The filters of a stage, in the order they are to be laid on: the last says which error a call gets.
    fn filters(self, stage: Stage) -> Result<Vec<BpfProgram>, SandboxError> {
        let allowed = match stage {
            Stage::Start => Calls::start(),
            Stage::Serve => Calls::serve(),
            Stage::Work => Calls::work(),
        };
        let (allow, refuse) = (SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32));
        if self != Self::On {
            return Ok(vec![compile(allowed, SeccompAction::Log, allow)?]);
        }
        let mut filters = vec![compile(allowed, refuse, allow.clone())?];
        if stage == Stage::Start {
            filters.push(compile(Calls::attacks(), allow.clone(), SeccompAction::KillProcess)?);
            filters.push(compile(Calls::absent(), allow, SeccompAction::Errno(libc::ENOSYS as u32))?);
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

/// Gives up all capabilities of the calling thread but these.
fn keep_capabilities(kept: CapabilitySet) -> Result<(), SandboxError> {
    let refused = SandboxError::step;
    let had = capabilities(None).map_err(refused("read the capabilities"))?;
    let sets = CapabilitySets {
        effective: had.effective & kept,
        permitted: had.permitted & kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(refused("give up capabilities"))
}

#[cfg(test)]
mod tests;
