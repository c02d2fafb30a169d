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

mod calls;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, apply_filter};
use std::collections::BTreeMap;
use std::io;

use calls::Calls;

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

#[cfg(test)]
mod tests;
