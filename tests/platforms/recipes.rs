//! The scripts of `deploy/recipes` boot a VM on a served tap and take it out. QEMU's boots an unmodified cloud-init.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use support::agent::{self, Agent};
use support::host::{self, Host};
use support::netns::run;
use support::packages::{Packages, With};
use support::privileged;
use support::process::write_script;
use support::record::replace;

const NAME: &str = "web-1";
const SEED: &str = "ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/";
/// Seconds that a script may wait for its guest. An emulated one needs about 30 s of CPU.
const PATIENCE: &str = "900";
/// The line of cloud-init that ends the wait. The stand-in says it in two pieces.
const SAID: &str =
    "Cloud-init v. 22.4.2 finished at now. Datasource DataSourceNoCloudNet.  Up 21.40 seconds\n";
const STAND_IN: &str = include_str!("recipes/stand_in.sh");
const KERNEL_OPTIONS: &str = "console=ttyS0 rdinit=/init quiet no_timer_check mitigations=off audit=0 apparmor=0 \
                              random.trust_cpu=on panic=-1";

/// A node whose agent takes registrations.
struct Node {
    host: Host,
    room: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        Self { host: Host::new().expect("a node"), room: tempfile::tempdir().expect("a directory") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.room.path().join(name)
    }

    fn agent(&self) -> Result<Agent<'_>> {
        replace(&self.path("agent.yaml"), "api: {}\n")?;
        let mut words = agent::arguments(self.room.path(), &[]);
        let records = words.iter().position(|word| word == "--records").context("a word")?;
        words.drain(records..records + 2);
        words.extend(["--config".into(), self.path("agent.yaml").into()]);
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }

    /// A recipe's script with its variables. Programs of `programs` come before the machine's.
    fn recipe(&self, hypervisor: &str, programs: &Path) -> Result<Command> {
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/recipes").join(hypervisor).join("boot.sh");
        let agent = agent::binary()?;
        let own = agent.parent().context("the agent has a directory")?;
        let path = std::env::var("PATH")?;
        let mut command = Command::new(script);
        command.env("PATH", format!("{}:{}:{path}", programs.display(), own.display()));
        command.envs([("NAME", NAME), ("BRIDGE", host::BRIDGE), ("PATIENCE", PATIENCE)]);
        command.env("RUN", self.path("run")).env("NOTES", self.path("notes"));
        fs::create_dir_all(self.path("tmp"))?;
        command.env("TMPDIR", self.path("tmp"));
        Ok(command)
    }

    /// Runs a recipe with a stand-in for its hypervisor.
    fn run_stand_in(&self, recipe: &Recipe, quick: bool) -> Result<Output> {
        fs::create_dir_all(self.path("notes"))?;
        fs::create_dir_all(self.path("bin"))?;
        write_script(&self.path("bin").join(recipe.program), STAND_IN)?;
        let mut command = self.recipe(recipe.hypervisor, &self.path("bin"))?;
        if quick {
            command.env("QUICK", "1");
        }
        self.host.ns().output(command.args(recipe.arguments))
    }

    fn noted(&self, name: &str) -> String {
        fs::read_to_string(self.path("notes").join(name)).expect("a note of the stand-in")
    }

    /// Checks that neither the tap, the registration nor a temporary file is left.
    fn is_clean(&self, what: &str) {
        let left = self.host.ns().ip(&format!("link show {NAME}"));
        assert!(left.is_err(), "{what}: {left:?}");
        let mut command = Command::new(agent::binary().expect("the agent"));
        let listed = command.args(["get", NAME, "--run"]).arg(self.path("run")).output().expect("it runs");
        assert!(!listed.status.success(), "{what}: {listed:?}");
        let files: Vec<_> = fs::read_dir(self.path("tmp")).expect("a directory").collect();
        assert!(files.is_empty(), "{what}: {files:?}");
    }
}

/// A recipe and what its hypervisor must be told.
struct Recipe {
    hypervisor: &'static str,
    program: &'static str,
    /// The arguments that a user adds.
    arguments: &'static [&'static str],
    /// The start of each argument that names tap, MAC, UUID or seed; `MAC` and `UUID` stand for the record's.
    told: &'static [&'static str],
}

const RECIPES: [Recipe; 3] = [
    Recipe {
        hypervisor: "qemu",
        program: "qemu-system-x86_64",
        arguments: &["-drive", "file=disk.qcow2,if=virtio,snapshot=on"],
        told: &[
            "tap,id=n0,ifname=web-1,",
            "virtio-net-pci,netdev=n0,mac=MAC,",
            "UUID",
            "type=1,serial=ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/",
            "file=disk.qcow2,if=virtio,snapshot=on",
        ],
    },
    Recipe {
        hypervisor: "cloud-hypervisor",
        program: "cloud-hypervisor",
        arguments: &["--firmware", "hypervisor-fw", "--disk", "path=disk.raw"],
        told: &[
            "tap=web-1,mac=MAC",
            "serial_number=ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/,uuid=UUID",
            "path=disk.raw",
        ],
    },
    Recipe {
        hypervisor: "firecracker",
        program: "firecracker",
        arguments: &["vmlinux", "rootfs.ext4"],
        told: &["--no-api", "--config-file"],
    },
];

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

#[privileged::test]
fn each_recipe_starts_its_hypervisor_on_a_served_tap_and_takes_the_vm_out() {
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    for recipe in &RECIPES {
        let what = recipe.hypervisor;
        let output = node.run_stand_in(recipe, false).expect("it runs");
        assert!(output.status.success() && text(&output).contains(SAID), "{what}: {output:?}");
        let instance: Value = serde_json::from_str(&node.noted("instance.json")).expect("JSON");
        assert_eq!(instance["state"], "served", "{what}: {instance}");
        let record = &instance["record"];
        let mac = record["network"]["nics"][0]["mac"].as_str().expect("a MAC");
        let uuid = record["vm"]["uuid"].as_str().expect("a UUID");
        let arguments = node.noted("arguments");
        for told in recipe.told {
            let told = told.replace("MAC", mac).replace("UUID", uuid);
            assert!(
                arguments.lines().any(|word| word.starts_with(&told)),
                "{what}: no {told} in {arguments}"
            );
        }
        let link: Value = serde_json::from_str(&node.noted("link.json")).expect("JSON");
        assert_eq!(link[0]["master"], host::BRIDGE, "{what}: {link}");
        node.is_clean(what);
    }
}

#[test]
fn a_recipe_without_arguments_says_how_it_is_called_and_does_nothing() {
    for recipe in &RECIPES {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("../deploy/recipes/{}/boot.sh", recipe.hypervisor));
        for (words, code) in [(&[][..], 2), (&["--help"], 0)] {
            let output = Command::new(&script).args(words).output().expect("it runs");
            let (said, other) =
                if code == 0 { (&output.stdout, &output.stderr) } else { (&output.stderr, &output.stdout) };
            let said = String::from_utf8_lossy(said);
            assert_eq!((output.status.code(), other.len()), (Some(code), 0), "{said}");
            let usage = format!("Usage: {} ", script.display());
            for part in [&usage, "BRIDGE=br0", "USER_DATA  a file", "PATIENCE   seconds"] {
                assert!(said.contains(part), "{}: {part} is missing from {said}", recipe.hypervisor);
            }
        }
    }
}

#[privileged::test]
fn firecrackers_configuration_names_tap_mac_and_seed() {
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    let [.., firecracker] = &RECIPES;
    let output = node.run_stand_in(firecracker, false).expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let instance: Value = serde_json::from_str(&node.noted("instance.json")).expect("JSON");
    let vm: Value = serde_json::from_str(&node.noted("vm.json")).expect("JSON");
    assert_eq!(vm["network-interfaces"][0]["host_dev_name"], NAME);
    assert_eq!(vm["network-interfaces"][0]["guest_mac"], instance["record"]["network"]["nics"][0]["mac"]);
    assert_eq!(vm["boot-source"]["kernel_image_path"], "vmlinux");
    let options = vm["boot-source"]["boot_args"].as_str().expect("text");
    assert!(options.split(' ').any(|word| word == SEED), "{options}");
    assert_eq!(vm["drives"][0]["path_on_host"], "rootfs.ext4");
    assert_eq!(vm.get("mmds-config"), None, "Firecracker's own metadata service would answer instead");
}

#[privileged::test]
fn firecrackers_recipe_takes_an_initrd() {
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    let [.., firecracker] = &RECIPES;
    let recipe = Recipe { arguments: &["vmlinux", "rootfs.ext4", "initrd.img"], ..*firecracker };
    let output = node.run_stand_in(&recipe, true).expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let vm: Value = serde_json::from_str(&node.noted("vm.json")).expect("JSON");
    assert_eq!(vm["boot-source"]["initrd_path"], "initrd.img", "{vm}");
}

#[privileged::test]
fn firecrackers_recipe_refuses_other_numbers_of_arguments_and_leaves_nothing() {
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    let [.., firecracker] = &RECIPES;
    for arguments in [&["vmlinux"] as &[_], &["vmlinux", "rootfs.ext4", "initrd.img", "more"]] {
        let output = node.run_stand_in(&Recipe { arguments, ..*firecracker }, true).expect("it runs");
        assert!(text(&output).contains("expected a kernel, a root file system"), "{output:?}");
        node.is_clean("firecracker");
    }
}

/// Stands for `xdp-imds`, and interrupts the script as `register` ends.
const INTERRUPTING: &str = "#!/bin/sh\n\"$AGENT\" \"$@\"\ncode=$?\n\
                            [ \"$1\" != register ] || kill -TERM \"$PPID\"\nexit \"$code\"\n";

/// Stands for `xdp-imds`, and ends as `register` does if the agent falls silent after it has stored the record.
const SILENT: &str = "#!/bin/sh\n\"$AGENT\" \"$@\"\ncode=$?\n\
                      [ \"$1\" != register ] || exit 5\nexit \"$code\"\n";

#[privileged::test]
fn a_recipe_without_its_bridge_or_an_agent_says_so_and_leaves_nothing() {
    let node = Node::new();
    fs::create_dir_all(node.path("bin")).expect("a directory");
    write_script(&node.path("bin").join("qemu-system-x86_64"), STAND_IN).expect("a script");
    for (bridge, expected) in
        [("no-bridge", "cannot put the tap on the bridge no-bridge"), (host::BRIDGE, "no agent answers")]
    {
        let mut command = node.recipe("qemu", &node.path("bin")).expect("a recipe");
        let output =
            node.host.ns().output(command.env("BRIDGE", bridge).arg("-nodefaults")).expect("it runs");
        assert!(output.status.code() == Some(1) && text(&output).contains(expected), "{bridge}: {output:?}");
        node.is_clean(bridge);
    }
}

#[privileged::test]
fn a_recipe_that_is_interrupted_while_it_registers_takes_the_vm_out() {
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    fs::create_dir_all(node.path("bin")).expect("a directory");
    write_script(&node.path("bin/xdp-imds"), INTERRUPTING).expect("written");
    let mut recipe = node.recipe("qemu", &node.path("bin")).expect("a command");
    recipe.args(RECIPES[0].arguments).env("AGENT", agent::binary().expect("the agent"));
    let output = node.host.ns().output(&mut recipe).expect("it runs");
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    node.is_clean("qemu");
}

#[privileged::test]
fn a_recipe_whose_agent_falls_silent_while_it_registers_takes_the_vm_out() {
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    fs::create_dir_all(node.path("bin")).expect("a directory");
    write_script(&node.path("bin/xdp-imds"), SILENT).expect("written");
    write_script(&node.path("bin/qemu-system-x86_64"), STAND_IN).expect("written");
    let mut recipe = node.recipe("qemu", &node.path("bin")).expect("a command");
    recipe.args(RECIPES[0].arguments).env("AGENT", agent::binary().expect("the agent"));
    let output = node.host.ns().output(&mut recipe).expect("it runs");
    let said = text(&output);
    assert!(output.status.code() == Some(1) && said.contains("no agent answers"), "{output:?}");
    node.is_clean("qemu");
}

#[privileged::test]
fn a_recipe_whose_hypervisor_ends_early_fails_and_takes_the_vm_out() {
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    for recipe in &RECIPES {
        let output = node.run_stand_in(recipe, true).expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{}: {output:?}", recipe.hypervisor);
        assert!(text(&output).contains("the hypervisor has ended"), "{}: {output:?}", recipe.hypervisor);
        node.is_clean(recipe.hypervisor);
    }
}

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("cannot end process {}: {error}", self.0.id());
        }
    }
}

/// Starts a DHCP server on the node's bridge.
fn dhcp(node: &Node, busybox: &Path) -> Result<Running> {
    let (settings, leases) = (node.path("udhcpd.conf"), node.path("leases"));
    fs::write(&leases, "")?;
    let text = format!(
        "interface {}\nstart 10.0.16.1\nend 10.0.16.9\nmax_leases 9\nlease_file {}\npidfile {}\n\
         option subnet 255.255.0.0\noption router {}\n",
        host::BRIDGE,
        leases.display(),
        node.path("udhcpd.pid").display(),
        host::ADDRESS
    );
    fs::write(&settings, text)?;
    let mut command = Command::new(busybox);
    command.args(["udhcpd", "-f"]).arg(&settings).stdin(Stdio::null()).stdout(Stdio::null());
    Ok(Running(node.host.ns().spawn(&mut command)?))
}

#[test]
fn qemus_recipe_boots_a_guest_until_its_cloud_init_is_done() {
    let Some(image) = Image::or_skip() else { return };
    let node = Node::new();
    let _agent = node.agent().expect("an agent");
    let _dhcp = dhcp(&node, &image.busybox()).expect("a DHCP server");
    let (user_data, told) = (node.path("user-data"), node.path("told"));
    fs::write(&user_data, "#cloud-config\nruncmd:\n- 'echo \"ran on $(hostname)\" >/dev/ttyS1'\n")
        .expect("written");
    let mut recipe = node.recipe("qemu", Path::new("/nowhere")).expect("a command");
    recipe.env("USER_DATA", &user_data);
    // TCG emulates the vector extensions of newer models slowly.
    recipe.args(["-cpu", "qemu64,-svm", "-append", KERNEL_OPTIONS]);
    recipe.arg("-kernel").arg(image.kernel()).arg("-initrd").arg(image.initramfs());
    recipe.arg("-serial").arg(format!("file:{}", told.display()));
    let output = node.host.ns().output(&mut recipe).expect("it runs");
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("DataSourceNoCloudNet [seed=dmi,http://169.254.169.254/v1/]"), "{said}");
    assert_eq!(fs::read_to_string(&told).expect("the guest's word").trim(), format!("ran on {NAME}"));
    node.is_clean("qemu");
}

// A guest that boots quickly under emulation: Debian's kernel, and an initramfs with its unmodified cloud-init.

const SUITE: &str = "bookworm";
/// The package of the newest kernel for clouds.
const KERNEL: &str = "?reverse-depends(?exact-name(linux-image-cloud-amd64))";
const PROGRAMS: &[&str] = &[
    "base-passwd",
    "busybox-static",
    "cloud-init",
    "coreutils",
    "dash",
    "grep",
    "hostname",
    "ifupdown",
    "kmod",
    "mawk",
    "mount",
    "python3-cffi-backend",
    "sed",
    "util-linux",
];
/// Parts of packages that cloud-init depends on and this guest never uses. They are a third of its size.
const LEFT_OUT: &str = "rm -rf usr/share/perl* usr/lib/*/perl* usr/share/i18n usr/lib/*/libperl*";
/// The drivers of a virtio NIC, in the order in which they can be loaded.
const MODULES: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
];
const INIT: &str = include_str!("recipes/init.sh");
const INTERFACES: &str = "auto lo\niface lo inet loopback\nsource /etc/network/interfaces.d/*\n";
/// Modules that show what came of the metadata. All others of Debian's image prepare a disk or install packages.
const STAGES: &str = "cloud_init_modules: [set_hostname]\ncloud_config_modules: [runcmd]\n\
                      cloud_final_modules: [scripts-user, final-message]\nusers: []\n";
/// Debian compiles Python when a package is installed. An emulated processor would do it at each boot.
const COMPILE: &str = "\
import cloudinit.cmd.main, cloudinit.distros.debian, cloudinit.net.eni, cloudinit.sources.DataSourceNoCloud, \
cloudinit.sources.DataSourceNone, cloudinit.config.cc_final_message, cloudinit.config.cc_runcmd, \
cloudinit.config.cc_scripts_user, cloudinit.config.cc_set_hostname
";

/// The files of a guest.
struct Image {
    room: tempfile::TempDir,
    kernel: PathBuf,
    programs: Packages,
}

impl Image {
    /// Makes the guest; skips the test if Debian's packages are out of reach.
    #[track_caller]
    fn or_skip() -> Option<Self> {
        let kernel = Packages::or_skip(SUITE, &[KERNEL], With::Nothing)?;
        let programs = Packages::or_skip(SUITE, PROGRAMS, With::Dependencies)?;
        Some(Self::make(kernel.root(), programs).expect("an initramfs"))
    }

    fn make(kernel: &Path, programs: Packages) -> Result<Self> {
        let room = tempfile::tempdir()?;
        let tree = room.path().join("tree");
        // Other tests use the packages too, so nothing is written to them.
        run(Command::new("cp").args(["--archive", "--reflink=auto"]).arg(programs.root()).arg(&tree))?;
        run(Command::new("sh").args(["-c", LEFT_OUT]).current_dir(&tree))?;
        for directory in ["proc", "sys", "dev", "run", "tmp", "root", "modules", "etc/network/interfaces.d"] {
            fs::create_dir_all(tree.join(directory))?;
        }
        fs::write(tree.join("init"), INIT)?;
        fs::set_permissions(tree.join("init"), Permissions::from_mode(0o755))?;
        fs::write(tree.join("etc/network/interfaces"), INTERFACES)?;
        fs::write(tree.join("etc/cloud/cloud.cfg.d/90-guest.cfg"), STAGES)?;
        fs::write(tree.join("modules/list"), MODULES.join("\n") + "\n")?;
        for module in MODULES {
            let name = format!("{module}.ko");
            fs::copy(found(&kernel.join("lib/modules"), &name)?, tree.join("modules").join(&name))?;
        }
        let mut compile = Command::new("chroot");
        compile.arg(&tree).args(["/usr/bin/python3", "-c", COMPILE]);
        run(compile.env_remove("PYTHONDONTWRITEBYTECODE"))?;
        let pack = "find . | usr/bin/busybox cpio -o -H newc >../initramfs";
        run(Command::new("sh").args(["-c", pack]).current_dir(&tree))?;
        fs::remove_dir_all(&tree)?;
        let kernel = found(&kernel.join("boot"), "vmlinuz-*")?;
        Ok(Self { room, kernel, programs })
    }

    fn kernel(&self) -> &Path {
        &self.kernel
    }

    fn initramfs(&self) -> PathBuf {
        self.room.path().join("initramfs")
    }

    /// A static busybox, which has a DHCP server.
    fn busybox(&self) -> PathBuf {
        self.programs.root().join("usr/bin/busybox")
    }
}

/// The only file of this name below a directory.
fn found(below: &Path, name: &str) -> Result<PathBuf> {
    let list = run(Command::new("find").arg(below).args(["-name", name]))?;
    let mut lines = list.lines();
    let path = lines.next().with_context(|| format!("no {name} in {}", below.display()))?;
    ensure!(lines.next().is_none(), "several files {name} in {}:\n{list}", below.display());
    Ok(path.into())
}
