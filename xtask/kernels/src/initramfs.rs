//! The guest's file system, all of it in memory: tools of Debian, modules, programs, `init.sh`.

use crate::architecture::Architecture;
use crate::checks::Check;
use crate::cpio::Archive;
use crate::kernel::Kernel;
use crate::modules;
use crate::programs::Programs;
use anyhow::{Context as _, Result};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use testbed::packages::{Packages, With};

/// The release of the guest's tools. Its C library runs programs that are linked with an older one.
const SUITE: &str = "trixie";
/// The packages of the tools that tests and `init.sh` run, without their dependencies.
const TOOLS: [&str; 10] =
    ["coreutils", "curl", "dash", "grep", "iproute2", "iputils-ping", "kmod", "mount", "sed", "util-linux"];
const INIT: &str = include_str!("init.sh");
/// The directory of everything that is not Debian's.
const HOME: &str = "xdp-imds";
/// Directories on which `init.sh` mounts file systems, and those that tests need.
const DIRECTORIES: [&str; 7] = ["proc", "sys", "dev", "tmp", "run", "root", "var/lib"];

/// Writes the initramfs of a kernel to a file.
pub(crate) fn write(
    to: &Path,
    kernel: &Kernel,
    architecture: Architecture,
    programs: &Programs,
    checks: &[&Check],
) -> Result<()> {
    let tools = Packages::get_for(Some(architecture.debian()), SUITE, &TOOLS, With::Dependencies)
        .context("cannot get the guest's tools from Debian")?;
    let file = File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
    let mut archive = Archive::new(BufWriter::new(file));
    archive.tree(tools.root())?;
    for directory in DIRECTORIES {
        archive.directory(directory)?;
    }
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n")?;
    let lines: String = checks.iter().map(|check| check.line()).collect();
    archive.file(&format!("{HOME}/checks"), 0o644, lines.as_bytes())?;
    let found = kernel.root.as_deref().map(modules::find).transpose()?.unwrap_or_default();
    let mut list = String::new();
    for module in found {
        let name = module.file_name().context("a module has a name")?.to_string_lossy().into_owned();
        archive.copy(&format!("{HOME}/modules/{name}"), &module)?;
        list += &format!("{name}\n");
    }
    archive.file(&format!("{HOME}/modules.list"), 0o644, list.as_bytes())?;
    archive.copy(&format!("{HOME}/target/debug/xdp-imds"), &programs.agent)?;
    for (name, path) in &programs.tests {
        archive.copy(&format!("{HOME}/target/debug/deps/{name}"), path)?;
    }
    sources(&mut archive)?;
    Ok(archive.finish()?.flush()?)
}

/// Adds the files of the project that tests read, at the path that was compiled into them.
fn sources(archive: &mut Archive<BufWriter<File>>) -> Result<()> {
    let top = shell::top().to_str().context("the project's path is not UTF-8")?.trim_start_matches('/');
    archive.directory(&format!("{top}/tests"))?;
    for name in ["xdp-imds.bpf.o", "port-stub.bpf.o"] {
        let path = format!("metadata-ebpf/prebuilt/{name}");
        archive.copy(&format!("{top}/{path}"), &shell::top().join(&path))?;
    }
    Ok(())
}
