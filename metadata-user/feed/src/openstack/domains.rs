//! The instances of a compute node without OVN, by what libvirt keeps of its running domains.
//!
//! | What | Where |
//! |---|---|
//! | the instance, the taps and MACs of its ports | the domain, which Nova has libvirt run |
//! | its project, the ids and fixed addresses of its ports | Nova's element in the domain's metadata |
//!
//! Nova names a tap by the first characters of its port's id, which joins the two. No tenant writes either.

use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};
use tokio::sync::watch;

use super::OpenstackOptions;
use super::health::{OpenstackHealth, OpenstackPeer};
use super::ports::{self, LocalPort, NodeInstance, NodeInstances, PortBinding};
use crate::check::Check;
use crate::directory::{DirectoryChanges, DirectoryWatch};
use crate::libvirt::XML_BYTES;
use crate::libvirt::nova::NovaDomain;
use crate::{FeedError, blocking, record_part};
use metadata_common::port::PortName;
use metadata_content::record::event::EventState;

/// Most running domains of a node.
pub const DOMAINS: usize = 2_048;
/// How long to wait before the next attempt to watch the directory.
const RETRY: Duration = Duration::from_secs(1);
const READABLE: &str = "libvirt's directory of running domains, which can be read";
const REMEDY: &str = "See `systemctl status libvirtd virtqemud`; a libvirt in a container has to share the directory with the host";

/// What is known of the files, by their names.
type DomainFiles = BTreeMap<String, (String, NodeInstance)>;

/// Follows the directory, and begins again whenever it cannot be watched.
pub(super) async fn follow(
    options: Arc<OpenstackOptions>,
    health: &OpenstackHealth,
    views: &watch::Sender<Option<NodeInstances>>,
) {
    let mut files = DomainFiles::new();
    loop {
        let Err(error) = session(&options, health, views, &mut files).await;
        health.on_failure(OpenstackPeer::Libvirt, error.to_string());
        tokio::time::sleep(RETRY).await;
    }
}

async fn session(
    options: &Arc<OpenstackOptions>,
    health: &OpenstackHealth,
    views: &watch::Sender<Option<NodeInstances>>,
    files: &mut DomainFiles,
) -> Result<Infallible, FeedError> {
    let mut watch = DirectoryWatch::open(&options.domains)?;
    let mut changes = DirectoryChanges { all: true, ..DirectoryChanges::default() };
    loop {
        let (of, known) = (Arc::clone(options), std::mem::take(files));
        let (now, read) = blocking(move || {
            let mut files = known;
            let read = update(&of, &changes, &mut files);
            (files, read)
        })
        .await;
        *files = now;
        read?;
        health.on_answer(OpenstackPeer::Libvirt);
        let instances = files.values().cloned().collect();
        views.send_replace(Some(NodeInstances { instances, is_whole: true }));
        changes = watch.changed(Duration::ZERO).await?;
        if changes.gone {
            return Err(io_error(&options.domains, Errno::NOENT.into()));
        }
    }
}

/// Reads what has changed.
fn update(
    options: &OpenstackOptions,
    changes: &DirectoryChanges,
    files: &mut DomainFiles,
) -> Result<(), FeedError> {
    let names = if changes.all {
        let names = names(&options.domains)?;
        files.retain(|name, _| names.contains(name));
        names
    } else {
        changes.names.iter().filter(|name| is_domain(name)).cloned().collect()
    };
    for name in names {
        let path = options.domains.join(&name);
        let former = files.get(&name).map(|(key, _)| key.clone());
        let Some(instance) = read(&path, former, options) else {
            files.remove(&name);
            continue;
        };
        if files.len() >= DOMAINS && !files.contains_key(&name) {
            return Err(FeedError::Content {
                path: options.domains.clone(),
                expected: format!("at most {DOMAINS} running instances"),
                found: "more".into(),
                remedy: "move instances to other nodes",
            });
        }
        files.insert(name, instance);
    }
    Ok(())
}

fn names(directory: &Path) -> Result<BTreeSet<String>, FeedError> {
    let unreadable = |error| io_error(directory, error);
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name().into_string();
        names.extend(name.ok().filter(|name| is_domain(name)));
    }
    Ok(names)
}

/// True for the name of a domain's file. libvirt writes another one first, and renames it.
fn is_domain(name: &str) -> bool {
    name.ends_with(".xml")
}

fn io_error(path: &Path, error: io::Error) -> FeedError {
    FeedError::Io { path: path.to_owned(), expected: READABLE, error: error.into() }
}

/// The instance of a file, with its key. `None` without a file, and for a domain that is not Nova's or has no tap.
fn read(path: &Path, former: Option<String>, options: &OpenstackOptions) -> Option<(String, NodeInstance)> {
    let read = match record_part::read(path, XML_BYTES) {
        Ok(bytes) => NovaDomain::read(&bytes?).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match read {
        Ok(domain) => domain.and_then(|domain| Some((domain.uuid.clone(), describe(&domain, options)?))),
        // What is known of it stays in force.
        Err(reason) => {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let reason = format!("{}: {reason}", path.display());
            Some((former.unwrap_or(name), NodeInstance::Refused { reason, identities: None }))
        }
    }
}

fn describe(domain: &NovaDomain, options: &OpenstackOptions) -> Option<NodeInstance> {
    let NovaDomain { name, uuid, project, interfaces, .. } = domain;
    let mut taps =
        interfaces.iter().filter_map(|interface| Some((interface, interface.tap.clone()?))).peekable();
    taps.peek()?;
    let Some(known) = &domain.ports else {
        let reason = format!(
            "domain {name}: expected <nova:ports> in its metadata, found none: Nova before Wallaby (23.0) did not write \
             it; if Nova is newer, `openstack server reboot --hard {uuid}` has it written. Until then Neutron's \
             metadata agent answers the instance"
        );
        let identities = taps.map(|(interface, tap)| (PortName::local(tap), interface.mac)).collect();
        return Some(NodeInstance::Refused { reason, identities: Some(identities) });
    };
    let migration = domain.is_leaving.then_some(EventState::Started);
    let local: Vec<_> = taps
        .map(|(interface, tap)| {
            let port = known.iter().find(|port| ports::tap(&port.id).as_ref() == Some(&tap));
            let binding = port.map(|port| PortBinding {
                instance: uuid.clone(),
                project: project.clone(),
                // Nova does not write the length of the prefix.
                addresses: port
                    .addresses
                    .iter()
                    .map(|address| format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 }))
                    .collect(),
                migration,
            });
            let id = port.map_or(&tap, |port| &port.id).clone();
            (LocalPort { id, ifname: tap, mac: interface.mac, instance: uuid.clone() }, binding)
        })
        .collect();
    let all: Vec<_> = local.iter().map(|(port, _)| port).collect();
    let bound: Vec<_> = local.iter().filter_map(|(port, binding)| Some((port, binding.as_ref()?))).collect();
    Some(ports::describe(uuid, &all, &bound, options))
}

/// Reads the directory once.
pub(super) fn try_read(options: &OpenstackOptions) -> Result<(), FeedError> {
    names(&options.domains).map(drop)
}

/// Checks that the directory can be read, and whether Nova's metadata is as expected.
pub(super) fn check(options: &OpenstackOptions) -> Check {
    const NAME: &str = "openstack.domains";
    let changes = DirectoryChanges { all: true, ..DirectoryChanges::default() };
    let (shown, mut files) = (options.domains.display(), DomainFiles::new());
    if let Err(error) = update(options, &changes, &mut files) {
        return Check::fail(NAME, error.found(), READABLE, REMEDY);
    }
    let refused = files.values().find_map(|(_, instance)| match instance {
        NodeInstance::Refused { reason, .. } => Some(reason),
        NodeInstance::Expected(_) | NodeInstance::Bound(..) => None,
    });
    match refused {
        None => Check::ok(NAME, format!("{shown}: {} instances of Nova with taps", files.len())),
        Some(reason) => Check::warn(
            NAME,
            reason,
            "Nova's metadata, with the ports of each instance",
            "Neutron's metadata agent answers the instance until then: leave it running",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::{NodeInstance, NodeInstances, check, follow, read};
    use crate::check::CheckStatus;
    use crate::openstack::health::OpenstackHealth;
    use crate::openstack::{InstanceOrigin, OpenstackOptions, ports};
    use metadata_content::record::{Record, RecordLimits};
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::sync::watch;
    use tokio::time::timeout;

    const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    const OTHER: &str = "77777777-0f6a-4c1b-9a51-2f9a43b1c0de";
    const PROJECT: &str = "0123456789abcdef0123456789abcdef";
    const OWNER: &str = "<nova:owner><nova:user uuid=\"fedcba9876543210fedcba9876543210\">alice</nova:user>\
                         <nova:project uuid=\"0123456789abcdef0123456789abcdef\">demo</nova:project></nova:owner>";
    const PORTS: &str = "<nova:ports><nova:port uuid=\"5c2f9b1e-0f6a-4c1b-9a51-2f9a43b1c0de\">\
                         <nova:ip type=\"fixed\" address=\"10.0.0.5\" ipVersion=\"4\"/>\
                         <nova:ip type=\"fixed\" address=\"fd00::5\" ipVersion=\"6\"/></nova:port></nova:ports>";
    /// With hybrid plug and on Linux bridges; with OVS, where libvirt plugs the tap; and where os-vif does.
    const BRIDGE: &str = "<interface type='bridge'><mac address='fa:16:3e:00:00:01'/><source bridge='qbr5c2f9b1e-0f'/>\
                          <target dev='tap5c2f9b1e-0f'/><model type='virtio'/><mtu size='1450'/></interface>";
    const OVS: &str = "<interface type='bridge'><mac address='fa:16:3e:00:00:01'/><source bridge='br-int'/>\
                       <virtualport type='openvswitch'><parameters interfaceid='5c2f9b1e-0f6a-4c1b-9a51-2f9a43b1c0de'/>\
                       </virtualport><target dev='tap5c2f9b1e-0f'/></interface>";
    const ETHERNET: &str = "<interface type='ethernet'><mac address='fa:16:3e:00:00:01'/>\
                            <target dev='tap5c2f9b1e-0f'/></interface>";
    const SECOND: &str = "<interface type='bridge'><mac address='fa:16:3e:00:00:02'/>\
                          <source bridge='qbr77777777-0f'/><target dev='tap77777777-0f'/></interface>";
    const VIRTUAL_FUNCTION: &str = "<interface type='hostdev'><mac address='fa:16:3e:00:00:03'/></interface>";

    /// libvirt's file of a running domain.
    fn running(metadata: &str, interfaces: &str) -> String {
        format!(
            "<!--\nWARNING: THIS IS AN AUTO-GENERATED FILE.\n-->\n\n<domstatus state='running' reason='booted' pid='72'>\n\
             <vcpus>\n<vcpu id='0' pid='77'/>\n</vcpus>\n<devices>\n<device alias='net0'/>\n</devices>\n\
             <domain type='kvm' id='1'>\n<name>instance-0000002a</name>\n<uuid>{VM}</uuid>\n\
             <metadata>\n{metadata}\n</metadata>\n<devices>{interfaces}</devices>\n</domain>\n</domstatus>\n"
        )
    }

    /// Nova's element with these children after what it always has.
    fn nova(children: &str) -> String {
        format!(
            "<nova:instance xmlns:nova=\"http://openstack.org/xmlns/libvirt/nova/1.1\"><nova:package version=\"26.2.0\"/>\
             <nova:name>web</nova:name><nova:creationTime>2026-11-27 14:00:00</nova:creationTime>\
             <nova:flavor name=\"m1.small\"><nova:memory>2048</nova:memory></nova:flavor>{children}\
             <nova:root type=\"image\" uuid=\"{OTHER}\"/></nova:instance>"
        )
    }

    fn of(text: &str) -> Option<(String, NodeInstance)> {
        let file = tempfile::Builder::new().prefix("instance-").suffix(".xml").tempfile().expect("a file");
        fs::write(file.path(), text).expect("written");
        read(file.path(), None, &OpenstackOptions::default())
    }

    fn record((key, instance): (String, NodeInstance)) -> Record {
        let NodeInstance::Bound(value, owner) = instance else { panic!("{instance:?}") };
        ports::record(&key, value, owner, 7, &RecordLimits::DEFAULT).expect("a good record")
    }

    /// Each NIC's tap, MAC and addresses.
    fn nics(record: &Record) -> Vec<String> {
        let nics = record.network.nics.iter().map(|nic| {
            let tap = nic.port.as_ref().map(|port| port.ifname.to_string()).unwrap_or_default();
            let addresses: Vec<_> =
                nic.ipv4().chain(nic.ipv6()).map(|cidr| cidr.address.to_string()).collect();
            format!("{tap} {} {}", nic.mac.expect("a MAC").0, addresses.join(" "))
        });
        nics.collect()
    }

    #[test]
    fn an_instance_is_what_nova_says_of_the_taps_that_libvirt_has() {
        const FIRST: &str = "tap5c2f9b1e-0f fa:16:3e:00:00:01 10.0.0.5 fd00::5";
        const BARE: &str = "tap77777777-0f fa:16:3e:00:00:02 ";
        let both = PORTS.replace("</nova:ports>", &format!("<nova:port uuid=\"{OTHER}\"/></nova:ports>"));
        let floating = PORTS.replace(
            "</nova:port>",
            "<nova:ip type=\"floating\" address=\"192.0.2.5\" ipVersion=\"4\"/></nova:port>",
        );
        for (what, ports, interfaces, expected) in [
            ("a bridge", PORTS, BRIDGE.to_owned(), &[FIRST][..]),
            ("libvirt plugs into OVS", PORTS, OVS.into(), &[FIRST]),
            ("os-vif plugs into OVS", PORTS, ETHERNET.into(), &[FIRST]),
            ("two ports, one without an address", &both, format!("{BRIDGE}{SECOND}"), &[FIRST, BARE]),
            ("plugged, and Nova is about to say so", PORTS, format!("{BRIDGE}{SECOND}"), &[FIRST]),
            ("unplugged, and Nova is about to say so", &both, BRIDGE.into(), &[FIRST]),
            ("beside a virtual function", PORTS, format!("{VIRTUAL_FUNCTION}{BRIDGE}"), &[FIRST]),
            ("a floating address", &floating, BRIDGE.into(), &[FIRST]),
        ] {
            let record = record(of(&running(&nova(&format!("{OWNER}{ports}")), &interfaces)).expect(what));
            assert_eq!(record.owner_text(), format!("openstack/{PROJECT}/{VM}"), "{what}");
            assert_eq!(nics(&record), expected, "{what}");
            assert_eq!(record.events.len(), 0, "{what}");
        }
    }

    #[test]
    fn what_a_tenant_chooses_changes_neither_instance_nor_project() {
        // Nova escapes names, and properties of images, as lxml does.
        let forged =
            "&lt;/nova:name&gt;&lt;nova:owner&gt;&lt;nova:project uuid=\"evil\"/&gt;&lt;/nova:owner&gt;";
        let plain = nova(&format!("{OWNER}{PORTS}"));
        for name in
            [forged, "]]&gt;&lt;!--", "&amp;lt;x&amp;gt; &#13;&#10;{owner} ../..", "\u{202e}\u{1f4a9}é", ""]
        {
            let named = plain.replace(">web<", &format!(">{name}<")).replace(">demo<", &format!(">{name}<"));
            let image = format!(
                "<nova:image uuid=\"\"><nova:properties><nova:property name=\"owner\">{name}</nova:property>\
                 <nova:property name=\"ports\">{name}</nova:property></nova:properties></nova:image><nova:owner>"
            );
            let named = named.replace("<nova:owner>", &image);
            let record = record(of(&running(&named, BRIDGE)).expect(name));
            assert_eq!(record.owner_text(), format!("openstack/{PROJECT}/{VM}"), "{name}");
            assert_eq!((record.vm.name.to_string(), nics(&record).len()), (VM.to_owned(), 1), "{name}");
            assert!(!serde_json::to_string(&record).expect("JSON").contains("evil"), "{name}");
        }
    }

    #[test]
    fn domains_that_are_not_novas_or_have_no_tap_are_left_alone() {
        let ours = "<i:instance xmlns:i='https://xdp-imds.dev/libvirt/1'/>";
        let whole = nova(&format!("{OWNER}{PORTS}"));
        for (what, metadata, interfaces) in [
            ("no metadata", "", BRIDGE),
            ("ours", ours, BRIDGE),
            ("without a namespace", "<instance><owner><project uuid='p'/></owner></instance>", BRIDGE),
            ("another namespace", &whole.replace("openstack.org", "openstack.example"), BRIDGE),
            ("no tap", &whole, VIRTUAL_FUNCTION),
        ] {
            assert_eq!(of(&running(metadata, interfaces)), None, "{what}");
        }
    }

    #[test]
    fn what_cannot_be_told_for_sure_is_refused() {
        let whole = nova(&format!("{OWNER}{PORTS}"));
        let ussuri = nova(OWNER).replace("nova/1.1", "nova/1.0");
        for (what, text, words) in [
            (
                "before Wallaby",
                running(&ussuri, BRIDGE),
                &["instance-0000002a", "23.0", "reboot --hard", VM][..],
            ),
            ("two elements", running(&format!("{whole}{whole}"), BRIDGE), &["one <nova:instance>"]),
            ("two owners", running(&whole.replace(OWNER, &OWNER.repeat(2)), BRIDGE), &["one <nova:owner>"]),
            ("two lists", running(&whole.replace(PORTS, &PORTS.repeat(2)), BRIDGE), &["one <nova:ports>"]),
            ("no owner", running(&nova(PORTS), BRIDGE), &["the id of a project"]),
            ("no id", running(&whole.replace(PROJECT, ""), BRIDGE), &["the id of a project"]),
            ("a space", running(&whole.replace(PROJECT, "a b"), BRIDGE), &["the id of a project", "a b"]),
            ("too long", running(&whole.replace(PROJECT, &"f".repeat(65)), BRIDGE), &["the id of a project"]),
            ("half", whole[..whole.len() / 2].into(), &["well-formed"]),
            ("no domain", "<domstatus/>".into(), &["<domain>"]),
        ] {
            let Some((_, NodeInstance::Refused { reason, .. })) = of(&text) else {
                panic!("{what}: {:?}", of(&text))
            };
            assert!(words.iter().all(|word| reason.contains(word)), "{what}: {reason}");
        }
        let nics = |text: &str| of(text).and_then(|(_, instance)| Some(instance.identities()?.len()));
        assert_eq!(nics(&running(&ussuri, &format!("{BRIDGE}{SECOND}"))), Some(2));
        assert_eq!(nics(&whole[..whole.len() / 2]), None, "what is known of it stays");
        let unknown = of(&running(&nova(&format!("{OWNER}<nova:ports/>")), BRIDGE)).expect("an instance").1;
        let NodeInstance::Expected(ports) = unknown else { panic!("{unknown:?}") };
        assert_eq!(ports[0].0.ifname, "tap5c2f9b1e-0f", "its requests wait");
    }

    #[test]
    fn a_live_migration_is_announced_where_the_guest_runs() {
        let whole = running(&nova(&format!("{OWNER}{PORTS}")), BRIDGE);
        for (job, state) in [
            ("<job type='none' async='migration out' phase='perform3' flags='0x9'/>", Some("started")),
            ("<job type='none' async='migration in' phase='prepare' flags='0x9'/>", None),
            ("<job type='modify' async='none'/>", None),
        ] {
            let record = record(of(&whole.replace("<vcpus>", &format!("{job}<vcpus>"))).expect(job));
            let found: Vec<_> = record.events.iter().map(|event| event.state.name()).collect();
            assert_eq!(found, state.into_iter().collect::<Vec<_>>(), "{job}");
        }
    }

    const LONG: Duration = Duration::from_secs(20);

    /// Waits for what the keys and words of the view are.
    async fn becomes(views: &mut watch::Receiver<Option<NodeInstances>>, expected: &[(&str, &str)]) {
        let mut last = String::new();
        let seen = timeout(LONG, async {
            loop {
                let found = views.borrow_and_update().clone();
                last = format!("{found:?}");
                if let Some(NodeInstances { instances, is_whole: true }) = found
                    && instances.len() == expected.len()
                    && expected.iter().all(|(key, word)| {
                        instances.get(*key).is_some_and(|found| format!("{found:?}").contains(word))
                    })
                {
                    return;
                }
                views.changed().await.expect("it goes on");
            }
        });
        assert!(seen.await.is_ok(), "expected {expected:?}, found {last}");
    }

    #[tokio::test]
    async fn instances_come_and_go_with_the_files_and_stay_while_the_directory_is_away() {
        const HERE: &str = "00000000-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
        let room = tempfile::tempdir().expect("a directory");
        let domains = room.path().join("qemu");
        let options = Arc::new(OpenstackOptions {
            instances: InstanceOrigin::Libvirt,
            domains: domains.clone(),
            ..OpenstackOptions::default()
        });
        let (health, (views, mut seen)) = (OpenstackHealth::new(), watch::channel(None));
        // As libvirt replaces a file.
        let put = |directory: &Path, name: &str, text: &str| {
            let new = directory.join(format!("{name}.new"));
            fs::write(&new, text).expect("written");
            fs::rename(new, directory.join(name)).expect("renamed");
        };
        let whole = running(&nova(&format!("{OWNER}{PORTS}")), BRIDGE);
        // Another project's instance with the same address, on a port of its own.
        let other = whole.replace(VM, HERE).replace(PROJECT, "p2").replace("5c2f9b1e", "66666666");
        let steps = async {
            assert_eq!(check(&options).status, CheckStatus::Fail, "no directory");
            fs::create_dir(&domains).expect("libvirt starts");
            fs::write(domains.join("instance-1.xml.new"), "<half").expect("written");
            becomes(&mut seen, &[]).await;
            put(&domains, "instance-1.xml", &whole);
            becomes(&mut seen, &[(VM, PROJECT)]).await;
            put(&domains, "instance-2.xml", &other);
            put(&domains, "web.xml", &running("", BRIDGE));
            becomes(&mut seen, &[(VM, "10.0.0.5"), (HERE, "10.0.0.5")]).await;
            let found = check(&options);
            assert!(found.status == CheckStatus::Ok && found.found.contains("2 instances"), "{found:?}");
            put(&domains, "instance-1.xml", "<half");
            becomes(&mut seen, &[(VM, "well-formed"), (HERE, "p2")]).await;
            assert_eq!(check(&options).status, CheckStatus::Warn);
            fs::remove_file(domains.join("instance-1.xml")).expect("it ends");
            becomes(&mut seen, &[(HERE, "p2")]).await;

            let elsewhere = room.path().join("elsewhere");
            fs::rename(&domains, &elsewhere).expect("moved");
            while health.report(&options, 0, std::time::Instant::now()).problems.is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(seen.borrow().as_ref().is_some_and(|view| view.instances.contains_key(HERE)));
            put(&elsewhere, "instance-1.xml", &whole);
            fs::rename(&elsewhere, &domains).expect("it is back");
            becomes(&mut seen, &[(VM, PROJECT), (HERE, "p2")]).await;
            assert!(health.report(&options, 0, std::time::Instant::now()).problems.is_empty());
        };
        tokio::select! {
            () = follow(Arc::clone(&options), &health, &views) => {}
            ended = timeout(6 * LONG, steps) => ended.expect("in time"),
        }
    }
}
