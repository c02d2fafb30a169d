//! cloud-init's unmodified datasource classes accept what the record provides, and never sleep.
//!
//! Each class runs under the firmware identity of its cloud, on four forms of the record. A datasource of the
//! local stage starts on a NIC without addresses and gets its lease from the test. With `--nocapture` each
//! crawl prints its requests and seconds. Classes that the distribution's cloud-init lacks come from Debian's
//! `forky`. `XDP_IMDS_CLOUD_INIT=DIRECTORY` uses the classes of a checkout instead.

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use support::agent::{self, Agent, PortArgument};
use support::cloudinit::{CloudInit, Crawl, Machine, Release};
use support::guest::{Guest, METADATA, NIC, Route, Spec};
use support::host::{self, Host};
use support::record::{Identity, replace};

use Word::{Ec2, Number, Ocid, Text, Uuid};

const SERIAL: &str = "system-serial-number";
const UUID: &str = "system-uuid";
const PRODUCT: &str = "system-product-name";
const VENDOR: &str = "system-manufacturer";
const ASSET_TAG: &str = "chassis-asset-tag";
/// The root password of dialects that provide one.
const PASSWORD: &str = "correct-horse";

fn nocloud() -> Case {
    Case {
        stage: Stage::Network,
        dmi: &[(SERIAL, Text("ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/"))],
        // Without a label the class does not search disks for a seed.
        config: json!({"NoCloud": {"fs_label": null}}),
        asks: "GET /v1/meta-data",
        vendor_data: VendorData::Taken,
        ..Case::of("NoCloudNet")
    }
}

#[test]
fn nocloud_guests_find_their_seed() {
    nocloud().run();
}

fn openstack() -> Case {
    Case {
        dmi: &[(PRODUCT, Text("OpenStack Nova")), (UUID, Uuid)],
        asks: "GET /openstack/2018-08-27/meta_data.json",
        vendor_data: VendorData::Taken,
        sleeps: Some((Form::Required, 5.0, "it crawls EC2's tree as well, and never with a token")),
        ..Case::of("OpenStackLocal")
    }
}

#[test]
fn openstack_guests_find_their_cloud() {
    openstack().run();
}

fn ec2() -> Case {
    Case {
        dmi: &[(UUID, Uuid), (SERIAL, Uuid)],
        uuid: "ec2f1a52",
        instance_id: Ec2,
        asks: "PUT /latest/api/token",
        ..Case::of("Ec2Local")
    }
}

#[test]
fn ec2_guests_find_their_cloud_with_a_token() {
    ec2().run();
}

/// The agent learns from the first two guests of an image what the kernel answers to the third.
#[test]
fn guests_find_their_cloud_when_the_kernel_answers() {
    for case in [nocloud(), openstack(), ec2()] {
        Case { forms: &[Form::Full; 3], is_answered_in_kernel: true, ..case }.run();
    }
}

#[test]
fn guests_with_unknown_firmware_find_the_ec2_tree_without_a_token() {
    Case {
        stage: Stage::Network,
        dmi: &[(UUID, Uuid)],
        config: json!({"Ec2": {"strict_id": false}}),
        instance_id: Ec2,
        asks: "GET /2009-04-04/meta-data/instance-id",
        forms: &[Form::Full, Form::Bare, Form::Gzip],
        ..Case::of("Ec2")
    }
    .run();
}

#[test]
fn aliyun_guests_find_their_cloud() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("Alibaba Cloud ECS"))],
        instance_id: Ec2,
        asks: "GET /2016-01-01/user-data",
        vendor_data: VendorData::TakenByNewer,
        too_new: Some(TooNew {
            forms: &[Form::Required],
            deviations: &["seconds slept: ", "found: got \"false "],
            why: "it knows no tokens on this cloud",
        }),
        ..Case::of("AliYun")
    }
    .run();
}

#[test]
fn gce_guests_find_their_cloud() {
    Case {
        dmi: &[(PRODUCT, Text("Google Compute Engine"))],
        instance_id: Number,
        // The class ignores the administrator's keys unless the name is that of the image's default account. Keys
        // without an account belong to the default account.
        record: |record| record["admin"] = json!({"user": "somebody"}),
        asks: "GET /computeMetadata/v1/instance/id",
        ..Case::of("GCELocal")
    }
    .run();
}

#[test]
fn azure_guests_find_their_cloud_and_report_ready() {
    Case {
        dmi: &[(ASSET_TAG, Text("7783-7084-3265-9085-8269-3286-77")), (UUID, Uuid)],
        config: json!({"Azure": {"data_dir": "@DIRECTORY@/waagent"}}),
        asks: "POST /machine?comp=health",
        ..Case::of("Azure")
    }
    .run();
}

#[test]
fn digitalocean_guests_find_their_cloud_from_a_link_local_address() {
    Case {
        dmi: &[(VENDOR, Text("DigitalOcean")), (SERIAL, Number)],
        instance_id: Number,
        asks: "GET /metadata/v1.json",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("DigitalOcean")
    }
    .run();
}

#[test]
fn upcloud_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("UpCloud")), (UUID, Uuid)],
        asks: "GET /metadata/v1.json",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("UpCloudLocal")
    }
    .run();
}

#[test]
fn hetzner_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Hetzner")), (SERIAL, Number)],
        instance_id: Number,
        asks: "GET /hetzner/v1/metadata",
        vendor_data: VendorData::Taken,
        ..Case::of("Hetzner")
    }
    .run();
}

#[test]
fn vultr_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Vultr")), (SERIAL, Number)],
        metadata_route: true,
        asks: "GET /v1.json",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("Vultr")
    }
    .run();
}

#[test]
fn scaleway_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Scaleway"))],
        asks: "GET /conf?format=json",
        vendor_data: VendorData::Taken,
        text_only: true,
        // The class connects from port 1 again 0.8 ms after it closes the first connection. By then its own kernel
        // must have the last acknowledgement, which takes a tenth of that on an idle machine.
        again_after: Some("Cannot assign requested address"),
        ..Case::of("Scaleway")
    }
    .run();
}

/// The configuration a datasource derives from a password server's answer.
fn password() -> Value {
    json!({"password": PASSWORD, "ssh_pwauth": true})
}

fn cloudstack(record: &mut Value) {
    record["admin"]["password"] = PASSWORD.into();
    record["serve"]["date_tree"] = "cloudstack".into();
}

#[test]
fn exoscale_guests_find_their_cloud_and_their_password() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("Exoscale Compute Platform"))],
        record: cloudstack,
        asks: "GET /1.0/",
        own_config: password(),
        ..Case::of("Exoscale")
    }
    .run();
}

#[test]
fn cloudstack_guests_find_their_cloud_and_their_password() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("CloudStack KVM Hypervisor"))],
        dhcp_server: METADATA,
        record: cloudstack,
        asks: "GET /latest/meta-data/instance-id",
        own_config: password(),
        ..Case::of("CloudStack")
    }
    .run();
}

#[test]
fn oracle_guests_find_their_cloud() {
    Case {
        dmi: &[(ASSET_TAG, Text("OracleCloud.com")), (UUID, Uuid)],
        instance_id: Ocid,
        asks: "GET /opc/v2/instance/",
        ..Case::of("Oracle")
    }
    .run();
}

#[test]
fn nwcs_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("NWCS"))],
        asks: "GET /api/v1/metadata",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("NWCS")
    }
    .run();
}

#[test]
fn bigstep_guests_find_their_cloud_by_the_url_in_their_image() {
    Case {
        stage: Stage::Network,
        files: &[("data/seed/bigstep/url", "http://169.254.169.254/bigstep/metadata")],
        asks: "GET /bigstep/metadata",
        vendor_data: VendorData::Taken,
        text_only: true,
        ..Case::of("Bigstep")
    }
    .run();
}

#[test]
fn maas_guests_find_their_region_with_an_oauth_signature() {
    Case {
        stage: Stage::Network,
        config: json!({"MAAS": {
            "metadata_url": "http://169.254.169.254/MAAS/metadata/",
            "consumer_key": "consumer",
            "token_key": "token",
            "token_secret": "secret",
        }}),
        record: |record| {
            record["credentials"]["maas"] =
                json!({"consumer_key": "consumer", "token_key": "token", "token_secret": "secret"});
        },
        asks: "GET /MAAS/metadata/2012-03-01/meta-data/instance-id",
        vendor_data: VendorData::Taken,
        ..Case::of("MAAS")
    }
    .run();
}

#[test]
fn akamai_guests_find_their_cloud() {
    Case {
        dmi: &[(VENDOR, Text("Akamai")), (SERIAL, Number)],
        instance_id: Number,
        asks: "PUT /v1/token",
        releases: &[Release::Newer],
        ..Case::of("AkamaiLocal")
    }
    .run();
}

#[test]
fn cloudcix_guests_find_their_cloud() {
    Case {
        stage: Stage::Network,
        dmi: &[(PRODUCT, Text("CloudCIX"))],
        instance_id: Number,
        asks: "GET /v1/metadata",
        text_only: true,
        releases: &[Release::Newer],
        ..Case::of("CloudCIX")
    }
    .run();
}

// Runs one datasource, on the machine it expects, against every form of the record.

/// Maximum number of crawls of one form if [`Case::again_after`] applies.
const MAX_CRAWLS: usize = 20;

/// When in the boot the datasource runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before the network is up: the datasource configures it by DHCP or with a link-local address.
    Local,
    /// When the network is up.
    Network,
}

/// What a datasource does with vendor-data.
#[derive(Clone, Copy, Debug)]
enum VendorData {
    /// The dialect has no vendor-data.
    Unknown,
    Taken,
    /// Only the newer cloud-init requests it; the distribution's does not.
    TakenByNewer,
}

/// A value in the firmware tables, or an instance id.
#[derive(Clone, Copy, Debug)]
enum Word {
    Text(&'static str),
    Number,
    Ec2,
    Uuid,
    /// Oracle's long form of the UUID.
    Ocid,
}

/// Known deviations of a cloud-init too old for a feature.
struct TooNew {
    forms: &'static [Form],
    /// The beginning of each deviation expected in these forms.
    deviations: &'static [&'static str],
    why: &'static str,
}

impl TooNew {
    /// Removes the known deviations, and adds one for each known deviation that no longer occurs.
    fn forgive(&self, form: Form, wrong: &mut Vec<String>) {
        for known in self.deviations.iter().filter(|_| self.forms.contains(&form)) {
            let before = wrong.len();
            wrong.retain(|deviation| !deviation.starts_with(known));
            if wrong.len() == before {
                wrong.push(format!("{known:?} no longer occurs, though {}", self.why));
            }
        }
    }
}

/// A datasource and the expected result of its crawl.
struct Case {
    /// Class name without the prefix `DataSource`.
    class: &'static str,
    /// Releases of cloud-init whose class is run.
    releases: &'static [Release],
    stage: Stage,
    /// Firmware (DMI) values of the machine.
    dmi: &'static [(&'static str, Word)],
    /// Files of the image below cloud-init's own directory.
    files: &'static [(&'static str, &'static str)],
    /// The member `datasource` of cloud-init's configuration.
    config: Value,
    /// First group of the VM's UUID.
    uuid: &'static str,
    /// The DHCP server's identifier (option 54) in the lease. Only CloudStack's class asks the service there, which a
    /// network must arrange; every other class must do with a network that knows nothing of the service.
    dhcp_server: Ipv4Addr,
    /// Whether the lease routes 169.254.169.254 by itself (option 121). Only Vultr's class requires it, in 22.4.
    metadata_route: bool,
    /// Adds fields to the record.
    record: fn(&mut Value),
    instance_id: Word,
    /// Method and path of a request unique to this dialect. In every form it must be answered with 200.
    asks: &'static str,
    /// What the dialect does with vendor-data.
    vendor_data: VendorData,
    /// Whether the dialect carries only text, so that compressed user-data arrives in a MIME part.
    text_only: bool,
    forms: &'static [Form],
    /// A form in which the client sleeps whatever the answer is, the number of seconds, and the reason.
    sleeps: Option<(Form, f64, &'static str)>,
    /// Deviations of the distribution's cloud-init, if it is too old.
    too_new: Option<TooNew>,
    /// A warning after which to crawl again: it shows that the machine was too slow for a race inside the client.
    again_after: Option<&'static str>,
    /// What the datasource must add to the machine's cloud-config.
    own_config: Value,
    /// Whether the kernel answers requests. It must then answer most of the last guest's.
    is_answered_in_kernel: bool,
}

impl Case {
    /// A local-stage datasource with default settings.
    fn of(class: &'static str) -> Self {
        Self {
            class,
            releases: &[Release::Distribution, Release::Newer],
            stage: Stage::Local,
            dmi: &[],
            files: &[],
            config: json!({}),
            uuid: "7c0f1a52",
            dhcp_server: host::ADDRESS,
            metadata_route: false,
            record: |_| {},
            instance_id: Uuid,
            asks: "",
            vendor_data: VendorData::Unknown,
            text_only: false,
            forms: &Form::ALL,
            sleeps: None,
            too_new: None,
            again_after: None,
            own_config: json!({}),
            is_answered_in_kernel: false,
        }
    }

    /// Crawls with every release.
    fn run(&self) {
        for release in self.releases {
            let Some(cloud_init) = CloudInit::or_skip(*release) else { return };
            self.run_with(cloud_init);
        }
    }

    /// Crawls in every form, each in a guest of its own, and reports every deviation at once.
    fn run_with(&self, cloud_init: &CloudInit) {
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let guests: Vec<Guest> = (0..)
            .zip(self.forms)
            .map(|(number, &form)| {
                let identity = Identity::of(number);
                let mut record = form.record(&identity, &self.uuid(&identity));
                (self.record)(&mut record);
                replace(&identity.path(records.path()), &record.to_string()).expect("a record file");
                self.boot(&host, &identity)
            })
            .collect();
        let port = |guest: &Guest| PortArgument::new(guest.host_tap().name(), guest.identity().mac);
        let ports: Vec<_> = guests.iter().map(port).collect();
        let config = records.path().join("agent.conf");
        let in_kernel = format!("answer_requests_in_kernel: {}\n", self.is_answered_in_kernel);
        replace(&config, &in_kernel).expect("a configuration");
        let mut words = agent::arguments(records.path(), &ports);
        words.extend(["--config".into(), config.into()]);
        let binary = agent::binary().expect("the agent");
        let agent = Agent::start_binary(&binary, host.ns(), words).expect("an agent");
        let by_kernel =
            || agent.metrics().and_then(|metrics| metrics.frames("answer_request")).expect("a counter");
        let mut deviations = String::new();
        for (guest, &form) in guests.iter().zip(self.forms) {
            let before = by_kernel();
            let crawl = match self.crawl(cloud_init, guest) {
                Ok(crawl) => crawl,
                Err(error) => {
                    writeln!(deviations, "{form:?}: {error:#}").expect("text has room");
                    continue;
                }
            };
            eprintln!(
                "{:16} {:8} {:3} requests {:6.2} s, slept {} s, cloud-init {}",
                self.class,
                format!("{form:?}").to_lowercase(),
                crawl.requests.len(),
                crawl.seconds,
                crawl.slept(),
                crawl.version,
            );
            let mut wrong = self.wrong(guest.identity(), form, &crawl);
            let answered = by_kernel() - before;
            let is_last = std::ptr::eq(guest, &guests[guests.len() - 1]);
            if self.is_answered_in_kernel && is_last && answered * 2 < crawl.requests.len() as u64 {
                wrong.push(format!("the kernel answered {answered} requests of {}", crawl.requests.len()));
            }
            if let Some(too_new) = self.too_new.as_ref().filter(|_| !crawl.is_newer) {
                too_new.forgive(form, &mut wrong);
            }
            if !wrong.is_empty() {
                let asked = crawl.requests.iter().map(|asked| format!("{} {}", asked.status, asked.request));
                let shown: Vec<_> = asked.chain(crawl.warnings.iter().cloned()).collect();
                let (wrong, shown) = (wrong.join("\n    "), shown.join("\n        "));
                writeln!(deviations, "{form:?}:\n    {wrong}\n        {shown}").expect("text has room");
            }
        }
        assert!(deviations.is_empty(), "{}\n{deviations}", self.class);
    }

    /// Crawls once, and again after the warning [`Case::again_after`], up to [`MAX_CRAWLS`] times in all.
    fn crawl(&self, cloud_init: &CloudInit, guest: &Guest) -> Result<Crawl> {
        let machine = self.machine(guest.identity());
        let mut crawl = cloud_init.crawl(guest.ns(), self.class, &machine)?;
        for _ in 1..MAX_CRAWLS {
            let lost = self.again_after.filter(|lost| crawl.warnings.iter().any(|text| text.contains(lost)));
            let Some(lost) = lost else { break };
            eprintln!("{} crawls again after {lost:?}", self.class);
            crawl = cloud_init.crawl(guest.ns(), self.class, &machine)?;
        }
        Ok(crawl)
    }

    fn uuid(&self, identity: &Identity) -> String {
        format!("{}{}", self.uuid, &identity.instance_id[self.uuid.len()..])
    }

    fn text(&self, word: Word, identity: &Identity) -> String {
        match word {
            Text(text) => text.to_owned(),
            Number => NUMBER.to_owned(),
            Ec2 => EC2_ID.to_owned(),
            Uuid => self.uuid(identity),
            Ocid => format!("ocid1.instance.oc1..{}", self.uuid(identity)),
        }
    }

    /// A dual-stack guest, configured as far as the stage of the boot requires.
    fn boot(&self, host: &Host, identity: &Identity) -> Guest {
        let spec = Spec { route: Route::Gateway, ..Spec::of(identity) };
        let guest = Guest::boot(host, &spec).expect("a guest");
        if self.stage == Stage::Local {
            guest.ns().ip(&format!("-4 addr flush dev {NIC}")).expect("a NIC without addresses");
        }
        guest.enable_ipv6().expect("IPv6");
        guest.ns().ip(&format!("-6 route add fd00::/8 dev {NIC}")).expect("a route");
        guest
    }

    fn machine(&self, identity: &Identity) -> Machine {
        // A lease of a network that knows nothing of the service: a router, and no route to a metadata address.
        let mut lease = vec![
            ("interface", NIC.to_owned()),
            ("fixed-address", identity.address.to_string()),
            ("subnet-mask", "255.255.0.0".to_owned()),
            ("routers", host::ADDRESS.to_string()),
            ("dhcp-server-identifier", self.dhcp_server.to_string()),
        ];
        if self.metadata_route {
            let gateway = host::ADDRESS.octets().map(|byte| byte.to_string()).join(",");
            let routes = format!("32,169,254,169,254,0,0,0,0,0,{gateway}");
            lease.push(("rfc3442-classless-static-routes", routes));
        }
        Machine {
            dmi: self.dmi.iter().map(|&(name, word)| (name, self.text(word, identity))).collect(),
            config: json!({
                "datasource": self.config,
                "datasource_list": [],
                "system_info": {"default_user": {"name": USER}},
                "users": ["default"],
            }),
            lease: lease.into_iter().collect(),
            files: self.files.iter().copied().collect(),
        }
    }

    /// Every difference between a crawl and the record.
    fn wrong(&self, identity: &Identity, form: Form, crawl: &Crawl) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut check = |what: &str, got: &str, expected: &str| {
            if got != expected {
                wrong.push(format!("{what}: got {got:?}, expected {expected:?}"));
            }
        };
        let allowed = match self.sleeps {
            Some((slow, seconds, _)) if slow == form => seconds,
            _ => 0.0,
        };
        check("seconds slept", &format!("{:.1}", crawl.slept()), &format!("{allowed:.1}"));
        check("found", &format!("{} {}", crawl.found, crawl.trouble), "true ");
        if !crawl.found {
            return wrong;
        }
        let key = if form == Form::Bare { "" } else { &identity.ssh_key };
        let user_data = self.user_data(identity, form);
        let vendor_data = match self.vendor_data {
            VendorData::Taken if form != Form::Bare => VENDOR_DATA,
            VendorData::TakenByNewer if form != Form::Bare && crawl.is_newer => VENDOR_DATA,
            _ => "",
        };
        check("instance-id", &crawl.instance_id, &self.text(self.instance_id, identity));
        check("hostname", &crawl.hostname, &identity.hostname);
        check("keys", &crawl.ssh_keys.join("|"), key);
        check("user-data", &lossless(&crawl.user_data), &lossless(&user_data));
        check("vendor-data", &lossless(&crawl.vendor_data), &lossless(vendor_data.as_bytes()));
        check("trouble with the network", &crawl.network_trouble, "");
        for (name, value) in self.own_config.as_object().into_iter().flatten() {
            check(name, &crawl.own_config[name].to_string(), &value.to_string());
        }
        let asked = crawl.requests.iter().any(|asked| asked.status == 200 && asked.is(self.asks));
        check(&format!("{} answered 200", self.asks), &asked.to_string(), "true");
        wrong
    }

    fn user_data(&self, identity: &Identity, form: Form) -> Vec<u8> {
        match form {
            Form::Bare => Vec::new(),
            Form::Full | Form::Required => identity.user_data.clone().into_bytes(),
            Form::Gzip if self.text_only => format!(
                "MIME-Version: 1.0\nContent-Type: application/gzip\n\
                 Content-Transfer-Encoding: base64\n\n{GZIP}\n"
            )
            .into_bytes(),
            Form::Gzip => STANDARD.decode(GZIP).expect("base64"),
        }
    }
}

/// Returns UTF-8 unchanged and anything else as base64.
fn lossless(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => STANDARD.encode(bytes),
    }
}

// The forms of a record in which every datasource is crawled.

/// `#cloud-config\nruncmd:\n- [touch, /run/packed]\n`, compressed with gzip.
const GZIP: &str = "H4sIAAAAAAACA1NOzskvTdFNzs9Ly0znKirNS85NseLSVYguyS9NztBR0AcK6RckJmenpsRyAQAuDJvZLQAAAA==";
/// Vendor-data of a full record.
const VENDOR_DATA: &str = "#cloud-config\n{}\n";
/// The instance id of dialects that use a number; half of them also expect it as the firmware's serial.
const NUMBER: &str = "12345";
/// The instance id of EC2.
const EC2_ID: &str = "i-0f5e8a1b2c3d4e5f6";
/// The image's default user, who gets the record's keys.
const USER: &str = "debian";

/// One form of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Every optional field is set.
    Full,
    /// No user-data, vendor-data, keys, tags or metadata.
    Bare,
    /// User-data compressed with gzip.
    Gzip,
    /// Like `Full`, with session tokens required where the dialect supports them.
    Required,
}

impl Form {
    const ALL: [Self; 4] = [Self::Full, Self::Bare, Self::Gzip, Self::Required];

    /// The record of the guest with this UUID.
    fn record(self, identity: &Identity, uuid: &str) -> Value {
        let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
        record["vm"]["uuid"] = uuid.into();
        record["vm"]["ec2_id"] = EC2_ID.into();
        record["vm"]["numeric_id"] = NUMBER.parse::<u64>().expect("a number").into();
        record["admin"] = json!({"user": USER});
        record["network"]["dns"] = json!(["10.0.2.3"]);
        match self {
            Self::Bare => {
                let fields = record.as_object_mut().expect("a mapping");
                fields.retain(|name, _| !["user_data", "ssh_keys"].contains(&name.as_str()));
            }
            Self::Full | Self::Gzip | Self::Required => {
                record["vendor_data"] = json!({"text": VENDOR_DATA});
                record["labels"] = json!(["web"]);
                record["metadata"] = json!({"role": "web"});
            }
        }
        match self {
            Self::Gzip => record["user_data"] = json!({"base64": GZIP}),
            Self::Required => record["serve"] = json!({"imdsv2": "required"}),
            Self::Full | Self::Bare => {}
        }
        record
    }
}
