//! `xdp-imds-lab image-trial`, which `cargo xtask image --try` starts. A container of the image, with the DaemonSet's
//! privileges and no others, serves a guest whose tap is in another namespace. The container is stopped, and later
//! killed. Each time another container, in a network namespace of its own, continues, as in a rolling update.

use anyhow::{Context as _, Result, bail, ensure};
use flate2::read::GzDecoder;
use serde_json::{Value, json};
use std::cell::Cell;
use std::fs;
use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::bpffs::Bpffs;
use support::eventually;
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
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let map: Value = serde_yaml::from_str(&text)?;
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

// A container with the DaemonSet's grants, made by runc as kubelet would make it.

/// The longest time until a container ends after SIGTERM: the agent's drain, and a margin.
const STOP_PATIENCE: Duration = Duration::from_secs(20);
/// The numbers of the capabilities that our DaemonSet may request (include/uapi/linux/capability.h).
const NUMBERS: [(&str, u32); 7] = [
    ("DAC_READ_SEARCH", 2),
    ("NET_ADMIN", 12),
    ("NET_RAW", 13),
    ("IPC_LOCK", 14),
    ("SYS_PTRACE", 19),
    ("SYS_ADMIN", 21),
    ("BPF", 39),
];
/// The paths of `/proc` and `/sys` that kubelet hides or makes read-only.
const MASKED: [&str; 6] = [
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/sys/firmware",
];
const READONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// The privileges, arguments and volumes that the DaemonSet grants.
#[derive(Debug)]
struct Grant {
    capabilities: Vec<String>,
    arguments: Vec<Value>,
    mounts: Vec<Value>,
    volumes: Vec<Value>,
}

impl Grant {
    /// Reads the grants of a manifest.
    fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let daemonset: Value = serde_yaml::from_str(&text)?;
        let pod = &daemonset["spec"]["template"]["spec"];
        let agent = &pod["containers"][0];
        let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
        let security = &agent["securityContext"];
        ensure!(
            pod["hostPID"] == true && security["readOnlyRootFilesystem"] == true,
            "expected a DaemonSet with hostPID and a read-only root file system"
        );
        ensure!(
            security["capabilities"]["drop"] == json!(["ALL"]),
            "expected the DaemonSet to drop ALL capabilities"
        );
        let names = list(&security["capabilities"]["add"]);
        Ok(Self {
            capabilities: names.iter().filter_map(Value::as_str).map(ToOwned::to_owned).collect(),
            arguments: list(&agent["args"]),
            mounts: list(&agent["volumeMounts"]),
            volumes: list(&pod["volumes"]),
        })
    }

    /// Returns the names of the capabilities, without `CAP_`.
    fn capabilities(&self) -> &[String] {
        &self.capabilities
    }

    fn mask(&self) -> Result<u64> {
        self.capabilities.iter().try_fold(0, |mask, name| {
            let number = NUMBERS.iter().find(|(known, _)| known == name);
            Ok(mask | 1 << number.with_context(|| format!("the number of capability {name} is not known"))?.1)
        })
    }
}

/// An unpacked image, and directories in place of the node's.
#[derive(Debug)]
struct Bundle {
    room: tempfile::TempDir,
    entrypoint: Vec<Value>,
    containers: Cell<u32>,
}

impl Bundle {
    /// Unpacks an image of a layout.
    fn unpack(layout: &Path, tag: &str) -> Result<Self> {
        let json = |path: PathBuf| -> Result<Value> {
            let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            Ok(serde_json::from_slice(&text)?)
        };
        let blob = |of: &Value| -> Result<PathBuf> {
            let digest = of["digest"].as_str().and_then(|text| text.strip_prefix("sha256:"));
            Ok(layout.join("blobs/sha256").join(digest.context("expected a SHA-256 digest")?))
        };
        let index = json(layout.join("index.json"))?;
        let named = |entry: &&Value| entry["annotations"]["org.opencontainers.image.ref.name"] == tag;
        let entry = index["manifests"].as_array().into_iter().flatten().find(named);
        let manifest = json(blob(entry.with_context(|| format!("the layout has no image {tag}"))?)?)?;
        let config = json(blob(&manifest["config"])?)?;
        let room = tempfile::Builder::new().prefix("xdp-imds-try-").tempdir()?;
        let layer = File::open(blob(&manifest["layers"][0])?)?;
        tar::Archive::new(GzDecoder::new(layer)).unpack(room.path().join("rootfs"))?;
        for directory in ["records", "state", "run", "token-key", "identity"] {
            fs::create_dir(room.path().join(directory))?;
            fs::set_permissions(room.path().join(directory), fs::Permissions::from_mode(0o755))?;
        }
        let entrypoint =
            config["config"]["Entrypoint"].as_array().context("the image has no entry point")?.clone();
        Ok(Self { room, entrypoint, containers: Cell::new(0) })
    }

    /// Returns the directory of records.
    fn records(&self) -> PathBuf {
        self.room.path().join("records")
    }

    /// Writes the configuration, in place of the ConfigMap.
    fn configure(&self, text: &str) -> Result<()> {
        Ok(fs::write(self.room.path().join("config.yaml"), text)?)
    }

    /// Returns the directory or file that replaces a volume.
    fn source(&self, volume: &str, bpffs: &Path) -> Result<PathBuf> {
        Ok(match volume {
            "config" => self.room.path().join("config.yaml"),
            "bpffs" => bpffs.into(),
            "tun" => "/dev/net/tun".into(),
            "records" | "state" | "run" | "token-key" | "identity" => self.room.path().join(volume),
            other => bail!("there is no replacement for the volume {other}"),
        })
    }

    fn spec(&self, grant: &Grant, ns: &Namespace, bpffs: &Path) -> Result<Value> {
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]}),
            json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}),
        ];
        for mount in &grant.mounts {
            let name = mount["name"].as_str().context("expected a mount with a name")?;
            ensure!(
                grant.volumes.iter().any(|volume| volume["name"] == name),
                "the DaemonSet has no volume {name}"
            );
            let mode = if mount["readOnly"] == true { "ro" } else { "rw" };
            mounts.push(json!({"destination": mount["mountPath"], "type": "bind",
                "source": self.source(name, bpffs)?, "options": ["rbind", mode, "rslave"]}));
        }
        let capabilities: Vec<_> = grant.capabilities.iter().map(|name| format!("CAP_{name}")).collect();
        let mut arguments = self.entrypoint.clone();
        arguments.extend(grant.arguments.iter().cloned());
        Ok(json!({
            "ociVersion": "1.0.2",
            "process": {"terminal": false, "user": {"uid": 0, "gid": 0}, "cwd": "/", "args": arguments,
                "env": ["PATH=/usr/bin", "NODE_NAME=node"],
                "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities}},
            "root": {"path": "rootfs", "readonly": true},
            "hostname": "agent",
            "mounts": mounts,
            "linux": {
                // With hostPID, the container shares the node's process ids. All other namespaces are its own.
                "namespaces": [{"type": "mount"}, {"type": "ipc"}, {"type": "uts"},
                    {"type": "network", "path": ns.path()}],
                "resources": {"devices": [{"allow": false, "access": "rwm"}]},
                "cgroupsPath": format!("/xdp-imds-try-{}", std::process::id()),
                "maskedPaths": MASKED, "readonlyPaths": READONLY,
            },
        }))
    }
}

/// A running container. Dropping it ends it.
#[derive(Debug)]
struct Container<'a> {
    bundle: &'a Bundle,
    name: String,
    child: Child,
    log: PathBuf,
    ns: Namespace,
}

impl<'a> Container<'a> {
    /// Starts a container in a network namespace of its own.
    fn start(bundle: &'a Bundle, grant: &Grant, bpffs: &Path) -> Result<Self> {
        let number = bundle.containers.replace(bundle.containers.get() + 1);
        let ns = Namespace::new("agent")?;
        let room = bundle.room.path();
        fs::write(room.join("config.json"), bundle.spec(grant, &ns, bpffs)?.to_string())?;
        let name = format!("xdp-imds-try-{}-{number}", std::process::id());
        let log = room.join(format!("log-{number}"));
        let mut runc = runc(bundle);
        runc.args(["run", "--bundle"]).arg(room).arg(&name);
        let output = File::create(&log)?;
        let child = runc.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).spawn()?;
        Ok(Self { bundle, name, child, log, ns })
    }

    /// Returns the container's output so far.
    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Checks that the container's probes succeed. kubelet uses the same probes at another address.
    fn is_ready(&self) -> Result<()> {
        for path in ["healthz", "readyz"] {
            let mut curl = Command::new("curl");
            curl.args(["-sSf", "--noproxy", "*", "--max-time", "2"]);
            let output = self.ns.output(curl.arg(format!("http://127.0.0.1:9177/{path}")))?;
            let errors = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{path}: {}", errors.trim());
        }
        Ok(())
    }

    /// Checks that the container has no other capabilities than those granted, and that its sandbox is on.
    fn has_only(&self, grant: &Grant) -> Result<()> {
        let output = runc(self.bundle).args(["state", &self.name]).output()?;
        let state: Value = serde_json::from_slice(&output.stdout).context("cannot parse runc's state")?;
        let status = fs::read_to_string(format!("/proc/{}/status", state["pid"]))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(str::trim).with_context(|| format!("the status of the process has no {name}"))
        };
        // 2 stands for a filter of system calls.
        ensure!(
            field("Seccomp")? == "2" && field("NoNewPrivs")? == "1",
            "the process has no system call filter:\n{status}"
        );
        let expected = grant.mask()?;
        for name in ["CapBnd", "CapPrm"] {
            let found = u64::from_str_radix(field(name)?, 16)?;
            ensure!(found & !expected == 0, "{name} is {found:#x}, but only {expected:#x} is granted");
        }
        Ok(())
    }

    /// Stops the container with SIGTERM, as kubelet does.
    fn stop(mut self) -> Result<()> {
        self.signal("TERM")?;
        let status = self.wait()?;
        ensure!(status, "the container failed:\n{}", self.log());
        Ok(())
    }

    /// Kills the container, as a crash would.
    fn kill(mut self) -> Result<()> {
        self.signal("KILL")?;
        self.wait().map(drop)
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let output = runc(self.bundle).args(["kill", &self.name, signal]).output()?;
        ensure!(output.status.success(), "runc kill: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    fn wait(&mut self) -> Result<bool> {
        let until = Instant::now() + STOP_PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.success());
            }
            ensure!(Instant::now() < until, "the container has not ended:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        // A container that has ended has nothing left to delete, which runc reports as an error.
        let _ = runc(self.bundle).args(["delete", "--force", &self.name]).output();
        if let Err(error) = self.child.wait() {
            eprintln!("cannot end the container {}: {error}", self.name);
        }
    }
}

/// Returns runc with a state directory inside the bundle.
fn runc(bundle: &Bundle) -> Command {
    let mut command = Command::new("runc");
    command.arg("--root").arg(bundle.room.path().join("runc"));
    command
}
