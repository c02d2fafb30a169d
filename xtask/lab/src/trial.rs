//! `xdp-imds-lab image-trial`, which `cargo xtask image --try` starts. A container of the image, with the DaemonSet's
//! privileges and no others, serves a guest whose tap is in another namespace. The container is stopped, and later
//! killed. Each time another container, in a network namespace of its own, continues, as in a rolling update.

mod container;

use anyhow::{Context as _, Result, ensure};
use container::{Bundle, Container, Grant};
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

const DAEMONSET: &str = "deploy/kustomize/base/daemonset.yaml";
const CONFIGMAP: &str = "deploy/kustomize/base/configmap.yaml";
const REQUEST: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(20);
const PATH: &str = "/v1/user-data";

/// A namespace with a guest's tap and a process of KubeVirt's user, like the namespace of a launcher pod.
struct Launcher {
    process: Child,
    guest: Guest,
    identity: Identity,
    // Dropped last, after everything in it.
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
            eprintln!("process {} cannot be ended: {error}", self.process.id());
        }
    }
}

/// Returns the image's digest as skopeo reads it from a layout. skopeo also verifies the digests of all blobs.
fn read_by_skopeo(layout: &Path, tag: &str) -> Result<String> {
    let name = format!("oci:{}:{tag}", layout.display());
    let skopeo = |words: &[&str]| -> Result<String> {
        let output = Command::new("skopeo").args(words).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "skopeo cannot read {name}: {}", errors.trim());
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };
    let digest = skopeo(&["inspect", "--format", "{{.Digest}}", &name])?;
    let room = tempfile::tempdir()?;
    skopeo(&["--insecure-policy", "copy", "--quiet", &name, &format!("dir:{}", room.path().display())])?;
    Ok(digest)
}

fn unserved(container: &Container<'_>) -> String {
    format!("the guest is not served; the container's log:\n{}", container.log())
}

/// Returns the deployed configuration.
fn configuration() -> Result<String> {
    let path = shell::top().join(CONFIGMAP);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let map: serde_json::Value = serde_yaml::from_str(&text)?;
    let config = map["data"]["config.yaml"].as_str().context("the ConfigMap has no config.yaml")?;
    Ok(config.to_owned())
}

/// The image to try.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The directory of the image's layout
    layout: PathBuf,
    /// The image's name in the layout
    tag: String,
    /// The digest with which the image was written
    digest: String,
}

/// Tries the image with this name and digest.
pub(crate) fn run(args: &Args) -> Result<()> {
    shell::go_on_as_root(&[])?;
    let Args { layout, tag, digest } = args;
    shell::tools::ensure(&[("runc", "runc"), ("skopeo", "skopeo"), ("setpriv", "util-linux")])?;
    let found = read_by_skopeo(layout, tag)?;
    ensure!(found == *digest, "skopeo reads the digest {found}, expected {digest}");
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
        ensure!(answer.is_err(), "the guest got an answer although no agent runs");
        let links = bpffs.path().join("xdp-imds/v1/links");
        ensure!(
            links.read_dir().is_ok_and(|mut links| links.next().is_some()),
            "the agent left no pinned links"
        );
        Ok(())
    };
    let stopping = Instant::now();
    container.stop()?;
    let stopped = stopping.elapsed();
    closed()?;
    // A request that is sent before any agent can answer it.
    let waits = |container: &Container<'_>| {
        launcher.guest.fetch_own(PATH, PATIENCE).with_context(|| unserved(container)).map(drop)
    };
    let starting = Instant::now();
    let container = start()?;
    waits(&container)?;
    println!(
        "stopped within {} ms; the next one, in a namespace of its own, answers the waiting request {} ms after its \
         start",
        stopped.as_millis(),
        starting.elapsed().as_millis()
    );
    container.kill()?;
    closed()?;
    let container = start()?;
    waits(&container)?;
    println!("killed; the next one continues");
    container.stop()
}
