//! `xdp-imds-lab image-trial`, which `cargo xtask image --try` starts: a container of the image, with what the DaemonSet grants and nothing else, serves a guest whose tap is in another
//! namespace; it is stopped and killed, and another in a namespace of its own goes on, as in a rolling update.

mod container;

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::bpffs::Bpffs;
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::netns::Namespace;
use support::privilege::QEMU;
use support::record::Identity;
use support::tap::{Shape, Tap};

use container::{Bundle, Container, Grant};

const DAEMONSET: &str = "deploy/kustomize/base/daemonset.yaml";
const CONFIGMAP: &str = "deploy/kustomize/base/configmap.yaml";
const REQUEST: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(20);
const PATH: &str = "/v1/user-data";

/// Where a guest's tap is, with a process of KubeVirt's user in it, as a launcher's.
struct Launcher {
    process: Child,
    guest: Guest,
    identity: Identity,
    // Last: what is in it goes first.
    _ns: Namespace,
}

impl Launcher {
    fn new() -> Result<Self> {
        let identity = Identity::of(0);
        let ns = Namespace::new("launcher")?;
        let tap = Tap::create(&ns, "tap0", Shape::virtio())?;
        ns.ip("link set tap0 up")?;
        let spec = Spec { shape: Shape::virtio(), ..Spec::of(&identity) };
        let guest = Guest::boot_on(Arc::new(tap), Namespace::new("guest")?, &spec)?;
        let id = QEMU.to_string();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "sleep", "600"]);
        let process = ns.spawn(&mut command)?;
        Ok(Self { process, guest, identity, _ns: ns })
    }

    fn port(&self) -> String {
        let (pid, mac) = (self.process.id(), self.identity.mac);
        format!("{{ifname: tap0, netns: /proc/{pid}/ns/net, mac: \"{mac}\"}}")
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        if let Err(error) = self.process.kill().and_then(|()| self.process.wait()) {
            eprintln!("process {} stays behind: {error}", self.process.id());
        }
    }
}

/// What skopeo makes of a layout: the image's digest, having verified those of all blobs.
fn read_by_another(layout: &Path, tag: &str) -> Result<String> {
    let name = format!("oci:{}:{tag}", layout.display());
    let skopeo = |words: &[&str]| -> Result<String> {
        let output = Command::new("skopeo").args(words).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "skopeo takes {name} for no image: {}", said.trim());
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };
    let digest = skopeo(&["inspect", "--format", "{{.Digest}}", &name])?;
    let room = tempfile::tempdir()?;
    skopeo(&["--insecure-policy", "copy", "--quiet", &name, &format!("dir:{}", room.path().display())])?;
    Ok(digest)
}

fn unserved(container: &Container<'_>) -> String {
    format!("the guest is not served; the container said:\n{}", container.said())
}

/// The configuration that is deployed.
fn configuration() -> Result<String> {
    let path = shell::top().join(CONFIGMAP);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let map: serde_yaml::Value = serde_yaml::from_str(&text)?;
    let config = map["data"]["config.yaml"].as_str().context("a configuration in the ConfigMap")?;
    Ok(config.to_owned())
}

/// Which image to try.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The directory of its layout
    layout: PathBuf,
    /// Its name there
    tag: String,
    /// Its digest, as it was written
    digest: String,
}

/// Tries the image of this name and digest in a layout.
pub(crate) fn run(args: &Args) -> Result<()> {
    shell::go_on_as_root(&[])?;
    let Args { layout, tag, digest } = args;
    shell::tools::ensure(&[("runc", "runc"), ("skopeo", "skopeo"), ("setpriv", "util-linux")])?;
    let found = read_by_another(layout, tag)?;
    ensure!(found == *digest, "skopeo reads {found}, written was {digest}");
    let launcher = Launcher::new()?;
    let bpffs = Bpffs::mount()?;
    let grant = Grant::read(&shell::top().join(DAEMONSET))?;
    let bundle = Bundle::unpack(layout, tag)?;
    launcher.identity.write(&bundle.records(), 1)?;
    bundle.configure(&format!("{}\nports: [{}]\n", configuration()?, launcher.port()))?;
    let start = || Container::start(&bundle, &grant, bpffs.path());
    let container = start()?;
    eventually(PATIENCE, || launcher.guest.fetch_own(PATH, REQUEST)).with_context(|| unserved(&container))?;
    container.has_only(&grant)?;
    eventually(PATIENCE, || container.is_ready())?;
    println!("a container with {} serves a guest in another namespace", grant.capabilities().join(", "));
    let closed = || -> Result<()> {
        let answer = launcher.guest.fetch(PATH, Duration::from_millis(500));
        ensure!(answer.is_err(), "somebody answers though no agent runs");
        let links = bpffs.path().join("xdp-imds/v1/links");
        ensure!(links.read_dir().is_ok_and(|mut links| links.next().is_some()), "nothing is pinned");
        Ok(())
    };
    let stopping = Instant::now();
    container.stop()?;
    let stopped = stopping.elapsed();
    closed()?;
    // One request, which is asked before there is anybody to answer.
    let waits = |container: &Container<'_>| {
        launcher.guest.fetch_own(PATH, PATIENCE).with_context(|| unserved(container)).map(drop)
    };
    let starting = Instant::now();
    let container = start()?;
    waits(&container)?;
    println!(
        "stopped within {} ms; the next one, in a namespace of its own, answers what waited {} ms after its start",
        stopped.as_millis(),
        starting.elapsed().as_millis()
    );
    container.kill()?;
    closed()?;
    let container = start()?;
    waits(&container)?;
    println!("killed; the next one goes on");
    container.stop()
}
