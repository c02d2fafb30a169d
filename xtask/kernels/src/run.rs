//! `cargo xtask kernels`: every kernel on every architecture, one after the other.

use crate::architecture::Architecture;
use crate::checks::{self, Check};
use crate::kernel::{self, Kernel};
use crate::programs::{self, Programs};
use crate::report::{self, Row};
use crate::{boot, initramfs};
use anyhow::{Context as _, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Kernels, processors and checks.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kernels: 5.10, 6.1, 6.12 or newest (Debian's, downloaded once), or a path: a Debian package, a directory where
    /// one is unpacked, or an image [default: each of Debian's]
    #[arg(long = "kernel", value_name = "NAME|PATH", value_delimiter = ',')]
    kernels: Vec<String>,
    /// Processors; each kernel boots on each
    #[arg(long = "arch", value_name = "ARCH", value_delimiter = ',', default_value = "amd64")]
    architectures: Vec<Architecture>,
    /// The modules of an image: a directory that has lib/modules/RELEASE, or a Debian package. An image without
    /// modules needs taps, veths and bridges built in
    #[arg(long, value_name = "DIR|DEB")]
    modules: Option<PathBuf>,
    /// Run only these checks, by the names in the table
    #[arg(long = "check", value_name = "NAME", value_delimiter = ',')]
    checks: Vec<String>,
    /// Run only the checks of CI
    #[arg(long, conflicts_with = "checks")]
    short: bool,
    /// The longest time of one kernel, in minutes
    #[arg(long, value_name = "N", default_value_t = 30)]
    minutes: u64,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The name and version of the JSON format.
const SCHEMA: &str = "kernels/1";

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let checks = args.selected()?;
    let work = shell::target().join("kernels");
    fs::create_dir_all(&work)?;
    let tools: Vec<_> = args.architectures.iter().map(|architecture| architecture.qemu()).collect();
    shell::tools::ensure(&tools)?;
    let mut rows = Vec::new();
    for &architecture in &args.architectures {
        let programs = programs::build(architecture, &checks::programs(&checks), &work)?;
        for name in args.kernels() {
            eprintln!("\n== Linux {name}, {}", architecture.debian());
            rows.push(args.one(&name, architecture, &programs, &checks, &work));
        }
    }
    println!("{}", report::table(&rows, &checks));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({ "schema": SCHEMA, "kernels": rows }))?;
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let faults: Vec<_> = rows.iter().flat_map(|row| row.faults(&checks)).collect();
    ensure!(faults.is_empty(), "{}\nthe consoles are in {}", faults.join("\n"), work.display());
    Ok(())
}

impl Args {
    fn kernels(&self) -> Vec<String> {
        if self.kernels.is_empty() {
            kernel::names().map(str::to_owned).collect()
        } else {
            self.kernels.clone()
        }
    }

    fn selected(&self) -> Result<Vec<&'static Check>> {
        for name in &self.checks {
            if !checks::ALL.iter().any(|check| check.name == name) {
                let names: Vec<_> = checks::ALL.iter().map(|check| check.name).collect();
                bail!("there is no check `{name}`; expected one of: {}", names.join(", "));
            }
        }
        let is_selected = |check: &&Check| {
            let named = self.checks.is_empty() || self.checks.iter().any(|name| name == check.name);
            named && (check.short || !self.short)
        };
        Ok(checks::ALL.iter().filter(is_selected).collect())
    }

    /// Boots one kernel. A failure is part of the row, so that other kernels run nevertheless.
    fn one(
        &self,
        name: &str,
        architecture: Architecture,
        programs: &Programs,
        checks: &[&Check],
        work: &Path,
    ) -> Row {
        let mut row = Row {
            kernel: name.to_owned(),
            architecture,
            seconds: 0,
            must_refuse: false,
            trouble: None,
            report: Default::default(),
        };
        let booted = kernel::find(name, architecture, self.modules.as_deref(), work).and_then(|kernel| {
            row.kernel.clone_from(&kernel.name);
            row.must_refuse = kernel.refused;
            self.boot(&kernel, architecture, programs, checks, work)
        });
        match booted {
            Ok(booted) => {
                row.seconds = booted.seconds;
                row.trouble = booted.trouble;
                row.report = booted.report;
            }
            Err(error) => row.trouble = Some(format!("{error:#}")),
        }
        if let Some(trouble) = &row.trouble {
            eprintln!("{trouble}");
        }
        row
    }

    fn boot(
        &self,
        kernel: &Kernel,
        architecture: Architecture,
        programs: &Programs,
        checks: &[&Check],
        work: &Path,
    ) -> Result<boot::Booted> {
        let name = format!("{}-{}", kernel.name.replace('/', "_"), architecture.debian());
        let initramfs = work.join(format!("{name}.cpio"));
        initramfs::write(&initramfs, kernel, architecture, programs, checks)?;
        let console = work.join(format!("{name}.console"));
        let limit = Duration::from_secs(60 * self.minutes);
        let show = |line: &str| eprintln!("{}: {line}", kernel.name);
        let booted = boot::boot(&kernel.image, &initramfs, architecture, &console, limit, show);
        fs::remove_file(&initramfs)?;
        booted
    }
}
