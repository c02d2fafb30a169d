//! An empty tcx classifier, to measure the minimum cost of a program on a tap.
#![expect(
    unsafe_code,
    reason = "aya loads programs from ELF objects only, and this one has two instructions"
)]

use anyhow::{Context as _, Result};
use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_prog_type};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// `r0 = TC_ACT_UNSPEC` (continue with the next classifier), then `exit` (RFC 9669 §4).
const INSTRUCTIONS: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];

/// Attaches the classifier to an interface of this thread's namespace until the returned link is dropped.
///
/// # Errors
/// When there is no such interface, or the kernel has no tcx classifiers.
pub fn attach(ifindex: u32) -> Result<OwnedFd> {
    let licence = c"GPL";
    // `prog_type` and `insn_cnt`, `insns`, `license` of the kernel's `union bpf_attr`.
    let kind = bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS as u64;
    let count = (INSTRUCTIONS.len() as u64) << 32;
    let mut load = [kind | count, INSTRUCTIONS.as_ptr() as u64, licence.as_ptr() as u64];
    let program = bpf(bpf_cmd::BPF_PROG_LOAD, &mut load).context("cannot load an empty classifier")?;
    // `prog_fd` and `target_ifindex`, `attach_type` and `flags`.
    let place = program.as_raw_fd() as u64 | u64::from(ifindex) << 32;
    let mut create = [place, bpf_attach_type::BPF_TCX_INGRESS as u64];
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut create).context("cannot attach an empty classifier")
}

/// A command that returns a descriptor.
fn bpf(command: bpf_cmd, attributes: &mut [u64]) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads these bytes and the memory they point to, which outlives the call. It keeps no pointer.
    let returned = unsafe {
        libc::syscall(libc::SYS_bpf, command as u32, attributes.as_mut_ptr(), size_of_val(attributes))
    };
    let descriptor =
        i32::try_from(returned).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just made this descriptor for the caller, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
