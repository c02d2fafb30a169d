//! The drive's documents. Each expected text follows from the functions of qemu-server's Cloudinit.pm that the test
//! names; each digest is `sha1sum` of user-data and network configuration, one behind the other.

use metadata_content::record::RecordLimits;
use serde::Deserialize;

use super::super::drive::{self, Dns, DriveFormat};
use super::super::translate::nics;
use super::super::{ProxmoxOptions, VmConfig, translate};
use super::{GUIDE, RESOLV_CONF, given, parsed};

/// The drive's user-data, network configuration and instance id.
fn drive(text: &str) -> (String, String, String) {
    let config = parsed(text);
    let dns = Dns::of_vm(&config, &Dns::of_host(RESOLV_CONF));
    let mut problems = Vec::new();
    let network = DriveFormat::of(&config).network(&nics(&config, &mut problems), &dns);
    let user_data = drive::user_data(&config, 123);
    let id = drive::instance_id(&user_data, network.as_bytes());
    (String::from_utf8(user_data).expect("text"), network, id)
}

/// `cloudinit_userdata`, `nocloud_network`, `nocloud_gen_metadata`.
#[test]
fn the_guides_vm_has_the_documents_of_its_drive() {
    let (user_data, network, id) = drive(GUIDE);
    let expected = "\
#cloud-config
hostname: ubuntu2
manage_etc_hosts: true
fqdn: ubuntu2
ssh_authorized_keys:
  - ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1k alice@example
chpasswd:
  expire: False
users:
  - default
package_upgrade: true
";
    assert_eq!(user_data, expected);
    let expected = "\
version: 1
config:
    - type: physical
      name: eth0
      mac_address: 'bc:24:11:2c:69:ec'
      subnets:
      - type: static
        address: '10.0.10.123'
        netmask: '255.255.255.0'
        gateway: '10.0.10.1'
    - type: nameserver
      address:
      - '192.0.2.53'
      search:
      - 'example.internal'
";
    assert_eq!(network, expected);
    assert_eq!(id, "d0027b11178fbc6df32ea3098b4c2f8de9867953");
}

/// `cloudinit_userdata` and `get_hostname_fqdn`, setting by setting.
#[test]
fn each_setting_changes_the_user_data_as_on_the_drive() {
    let head = |name: &str, fqdn: &str| {
        format!("#cloud-config\nhostname: {name}\nmanage_etc_hosts: true\nfqdn: {fqdn}\n")
    };
    let plain = head("VM123", "VM123");
    let tail = "chpasswd:\n  expire: False\nusers:\n  - default\npackage_upgrade: true\n";
    let cases = [
        ("", format!("{plain}{tail}")),
        ("name: a.example\nsearchdomain: b.example\n", head("a", "a.example") + tail),
        ("name: a\nsearchdomain: b.example\n", head("a", "a.b.example") + tail),
        ("searchdomain: b.example c.example\n", head("VM123", "VM123.b.example c.example") + tail),
        // Perl takes these two for false.
        ("name: a\nsearchdomain: 0\n", head("a", "a") + tail),
        ("name: a\nsearchdomain: \"\"\n", head("a", "a") + tail),
        ("name: not_a_name\n", format!("{plain}{tail}")),
        ("ciuser: alice\n", format!("{plain}user: alice\n{tail}")),
        ("ciuser: \"alice\"\n", format!("{plain}user: alice\n{tail}")),
        ("ciuser:\n", format!("{plain}{tail}")),
        ("ciuser:  \n", format!("{plain}user:  \n{tail}")),
        (
            "ciuser: root\n",
            format!(
                "{plain}user: root\ndisable_root: False\nchpasswd:\n  expire: False\npackage_upgrade: true\n"
            ),
        ),
        ("cipassword: $5$salt$hash\n", format!("{plain}password: $5$salt$hash\n{tail}")),
        ("sshkeys: a%20b%0A%0A%20%0Ac%0A\n", format!("{plain}ssh_authorized_keys:\n  - a b\n  - c\n{tail}")),
        ("sshkeys: a b\n", format!("{plain}{tail}")),
        ("ciupgrade: 0\n", format!("{plain}chpasswd:\n  expire: False\nusers:\n  - default\n")),
        ("ciupgrade: maybe\n", format!("{plain}{tail}")),
    ];
    for (text, expected) in cases {
        assert_eq!(drive(text).0, expected, "{text}");
    }
}

/// `nocloud_network`, `parse_ipconfig`, and `check_type`, which drops a setting of another format.
#[test]
fn each_form_of_an_address_is_that_of_the_drive() {
    let v4 = "      - type: static\n        address: '192.0.2.5'\n        netmask: '255.255.254.0'\n";
    let v6 = "      - type: static6\n        address: '2001:db8::5/064'\n";
    let cases = [
        ("ip=dhcp", Some("      - type: dhcp4\n".to_owned())),
        ("ip=192.0.2.5/23", Some(v4.to_owned())),
        ("ip=192.0.2.5/23,gw=192.0.2.1", Some(format!("{v4}        gateway: '192.0.2.1'\n"))),
        ("ip6=auto", Some("      - type: ipv6_slaac\n".into())),
        ("ip=dhcp,ip6=dhcp", Some("      - type: dhcp4\n      - type: dhcp6\n".into())),
        ("gw6=2001:db8::1,ip6=2001:db8::5/064", Some(format!("{v6}        gateway: '2001:db8::1'\n"))),
        // The drive has no word for an address of the guest's own.
        ("ip=manual,ip6=auto", Some("      - type: ipv6_slaac\n".into())),
        // qemu-server warns of these, and goes on without addresses.
        ("ip=dhcp,gw=192.0.2.1", Some(String::new())),
        ("ip=192.0.2.5/23,ip6=auto,gw6=2001:db8::1", Some(String::new())),
        // These are no setting, and the NIC is left out.
        ("ip=192.0.2.5", None),
        ("gw=192.0.2.1", None),
        ("ip=192.0.2.5/33", None),
        ("ip=2001:db8::5/64", None),
        ("ip=192.0.2.5/24,gw6=2001:db8::1", None),
        ("address=192.0.2.5/24", None),
    ];
    for (setting, subnets) in cases {
        let text = format!("net0: virtio=BC:24:11:00:00:01,bridge=vmbr0\nipconfig0: {setting}\n");
        let nic = subnets.map_or_else(String::new, |subnets| {
            format!(
                "    - type: physical\n      name: eth0\n      mac_address: 'bc:24:11:00:00:01'\n      subnets:\n{subnets}"
            )
        });
        let expected = format!(
            "version: 1\nconfig:\n{nic}    - type: nameserver\n      address:\n      - '192.0.2.53'\n      search:\n      - \
             'example.internal'\n"
        );
        assert_eq!(drive(&text).1, expected, "{setting}");
    }
}

/// `get_dns_conf`; `sort @ifaces` sorts names, not numbers; a NIC without `ipconfigN` is left out.
#[test]
fn nics_have_the_drives_order_and_resolvers_their_precedence() {
    let nic = |n: u8| format!("net{n}: e1000=BC:24:11:00:00:{n:02X},bridge=vmbr0,firewall=1,tag=7\n");
    let dhcp = |n: u8| format!("ipconfig{n}: ip=dhcp\n");
    let text = [nic(0), nic(2), dhcp(2), nic(10), dhcp(10)].concat();
    let (_, network, _) = drive(&format!("{text}nameserver: 192.0.2.1 2001:db8::1\nsearchdomain: a b\n"));
    let expected = "\
version: 1
config:
    - type: physical
      name: eth10
      mac_address: 'bc:24:11:00:00:0a'
      subnets:
      - type: dhcp4
    - type: physical
      name: eth2
      mac_address: 'bc:24:11:00:00:02'
      subnets:
      - type: dhcp4
    - type: nameserver
      address:
      - '192.0.2.1'
      - '2001:db8::1'
      search:
      - 'a'
      - 'b'
";
    assert_eq!(network, expected);
}

/// `configdrive2_network` on Linux, `cloudbase_network_eni` on Windows.
#[test]
fn the_config_drive_has_debians_interfaces() {
    let nics = "net0: virtio=BC:24:11:00:00:01,bridge=vmbr0\n\
                ipconfig0: ip=192.0.2.5/24,gw=192.0.2.1,ip6=2001:db8::5/64,gw6=2001:db8::1\n\
                net1: virtio=BC:24:11:00:00:02,bridge=vmbr0\nipconfig1: ip=dhcp,ip6=auto\n";
    let linux = "\
auto lo
iface lo inet loopback

        dns_nameservers 192.0.2.53
        dns_search example.internal
auto eth0
iface eth0 inet static
        address 192.0.2.5
        netmask 255.255.255.0
        gateway 192.0.2.1
iface eth0 inet6 static
        address 2001:db8::5
        netmask 64
        gateway 2001:db8::1
auto eth1
iface eth1 inet dhcp
iface eth1 inet6 auto
";
    assert_eq!(drive(&format!("{nics}citype: configdrive2\n")).1, linux);
    let windows = "\
auto eth0
iface eth0 inet static
        address 192.0.2.5
        netmask 255.255.255.0
        gateway 192.0.2.1
        dns-nameservers 192.0.2.53
iface eth0 inet6 static
        address 2001:db8::5
        netmask 64
        gateway 2001:db8::1
        dns-nameservers 192.0.2.53
auto eth1
iface eth1 inet dhcp
iface eth1 inet6 auto
";
    for kind in ["win11", "w2k8"] {
        assert_eq!(drive(&format!("{nics}ostype: {kind}\n")).1, windows, "{kind}");
    }
    assert!(drive(&format!("{nics}ostype: win10\ncitype: nocloud\n")).1.starts_with("version: 1\n"));
}

/// `read_etc_resolv_conf` in pve-common's INotify.pm.
#[test]
fn resolvers_of_the_node_are_read_as_proxmox_ve_reads_them() {
    let text = "# a comment\ndomain a.example\nsearch b.example c.example\n nameserver 192.0.2.1\n\
                nameserver 2001:db8::1\nnameserver here\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n search no\n";
    let dns = Dns::of_host(text);
    assert_eq!(dns.search, ["b.example"]);
    assert_eq!(dns.servers, ["192.0.2.1", "2001:db8::1", "192.0.2.3"]);
}

// Configurations made by seed, and what qemu-server put on the drive of each. `drives.jsonl` was recorded by running
// its `generate_cloudinit_config` (version 9.2.6, commit e6352be6) on files in a true pmxcfs.

const DRIVES: &str = include_str!("drives.jsonl");

/// A configuration, and what was recorded of its drive.
#[derive(Deserialize)]
struct Drive {
    vmid: u32,
    configuration: String,
    user_data: String,
    /// In the form of the drive.
    network: String,
    instance_id: String,
}

#[test]
fn recorded_drives_have_the_documents_that_are_served() {
    for line in DRIVES.lines() {
        let drive: Drive = serde_json::from_str(line).expect("a recorded drive");
        let (config, _) = VmConfig::parse(drive.configuration.as_bytes()).expect("a configuration");
        let made =
            translate(drive.vmid, &config, &given(), &ProxmoxOptions::default(), &RecordLimits::DEFAULT);
        let record = made.expect(&drive.configuration).record;
        let user_data = record.user_data.as_ref().and_then(|payload| payload.bytes()).expect("user-data");
        assert_eq!(str::from_utf8(&user_data), Ok(&*drive.user_data), "{}", drive.configuration);
        let dns = Dns::of_vm(&config, &Dns::of_host(RESOLV_CONF));
        let network = DriveFormat::of(&config).network(&nics(&config, &mut Vec::new()), &dns);
        assert_eq!(network, drive.network, "{}", drive.configuration);
        assert_eq!(record.instance_id(), drive.instance_id, "{}", drive.configuration);
    }
}
