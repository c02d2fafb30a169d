//! The wireserver, 168.63.129.16: serves the goal state and accepts reports that a guest is ready.

use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;

use super::super::route_builder::{JSON, RouteBuilder, TEXT, computed};
use crate::dialect::common::{IpVersion, given, known};
use crate::http::{Method, Response, StatusCode};
use crate::record::Record;
use crate::sink::MessageKind;
use crate::store::path::HOST_PLUGIN_PORT;
use crate::store::{Condition, LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};

const XML: &str = "text/xml; charset=utf-8";

/// Versions of the protocol, the preferred one first. Afterburn and WALinuxAgent require the second.
pub(super) const VERSIONS: [&str; 2] = ["2015-04-05", "2012-11-30"];

pub(super) static GUARDS: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| {
    [RequestGuard {
        condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
        otherwise: Response::error(StatusCode(400), &[]),
    }]
});

static TAKEN: LazyLock<Response> = LazyLock::new(|| Response::new(StatusCode(200), Some(XML), &[], ""));
/// WALinuxAgent accepts no other success for role properties.
static ACCEPTED: LazyLock<Response> = LazyLock::new(|| Response::new(StatusCode(202), Some(XML), &[], ""));
static PROVISIONED: LazyLock<Response> =
    LazyLock::new(|| Response::new(StatusCode(201), Some(JSON), &[], "{}"));

const POST: Methods = Methods::of(&[Method::Post]);

pub(super) fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let versions = routes.found(XML, versions());
    let root = computed("versions of the protocol, for comp=versions", move |call| {
        if comp(call) == "versions" { versions.clone().into() } else { not_found() }
    });
    routes.live("/", Methods::READ, &*GUARDS, root);
    let state = WireserverState::of(record);
    let goal_state = routes.own(XML, state.goal_state());
    let both = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    routes.live("/machine", both, &*GUARDS, Machine { goal_state, state });
    // The report of azure-init.
    let provisioned = computed("report to sinks.ready", |call| {
        forward(call);
        PROVISIONED.clone()
    });
    routes.live("/provisioning/health", POST, &*GUARDS, provisioned);
    // WALinuxAgent's observations of this server, once a minute.
    routes.live("/HealthService", POST, &*GUARDS, computed("accepted and dropped", |_| TAKEN.clone()));
}

/// Returns the value of a parameter. The name matches in any case.
fn parameter<'a>(call: &LiveRequest<'a>, named: &str) -> Option<std::borrow::Cow<'a, str>> {
    let mut parameters = form_urlencoded::parse(call.request.target.query.as_bytes());
    let found = parameters.find(|(name, _)| name.eq_ignore_ascii_case(named));
    found.map(|(_, value)| value)
}

/// Returns the value of `comp` in lower case.
fn comp(call: &LiveRequest<'_>) -> String {
    parameter(call, "comp").map_or_else(String::new, |value| value.to_ascii_lowercase())
}

fn not_found() -> LiveOutcome {
    Response::error(StatusCode(404), &[]).into()
}

/// Forwards a guest's report. The guest gets a success even if the report is dropped.
fn forward(call: &LiveRequest<'_>) {
    let mailbox = &call.vm.mailbox;
    mailbox.send(&call.vm.sinks, MessageKind::Ready, call.request.body, call.now.unix_seconds);
}

/// `/machine?comp=…`.
#[derive(Debug)]
struct Machine {
    goal_state: Response,
    state: WireserverState,
}

impl Machine {
    fn config(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let document = parameter(call, "type").and_then(|kind| self.state.config(&kind));
        document.map_or_else(not_found, |text| Response::new(StatusCode(200), Some(XML), &[], text).into())
    }
}

impl LiveRoute for Machine {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let posts = call.request.method == Method::Post;
        let only = |allowed| Response::error(StatusCode(405), &[("Allow", allowed)]).into();
        match (comp(call).as_str(), posts) {
            ("goalstate", false) => self.goal_state.clone().into(),
            ("config", false) => self.config(call),
            ("goalstate" | "config", true) => only("GET, HEAD"),
            ("health", true) => {
                forward(call);
                TAKEN.clone().into()
            }
            ("roleproperties", true) => {
                forward(call);
                ACCEPTED.clone().into()
            }
            // Telemetry is for Azure only, so it is dropped.
            ("telemetrydata", true) => TAKEN.clone().into(),
            ("health" | "roleproperties" | "telemetrydata", false) => only("POST"),
            _ => not_found(),
        }
    }

    fn about(&self) -> &'static str {
        "goal state and configuration, and reports to sinks.ready"
    }
}

// The goal state, and the configuration it refers to, as XML documents.
//
// WALinuxAgent refuses a goal state without `HostingEnvironmentConfig`, `SharedConfig` and `ConfigName`, and fetches
// the documents that the first two name (`goal_state.py` of 2.2.47 to 2.12). Afterburn reads addresses from
// `SharedConfig`. `ExtensionsConfig` states that there are no extensions, where the agent sends its status, and that
// there is no newer agent. Without the last two the agent logs an error at each report.
//
// There are no certificates, because they would only protect secrets of extensions.

const DECLARATION: &str = "<?xml version=\"1.0\" encoding=\"utf-8\"?>";

/// URL of the wireserver's documents, without their kind.
const BASE: &str = "http://168.63.129.16/machine/?comp=config";

/// SSH's port, the only endpoint listed for a VM with a public address. The agent itself forwards no port.
const ENDPOINT_PORT: u16 = 22;

/// Agent family in which WALinuxAgent looks for updates by default.
const FAMILY: &str = "Prod";

pub(super) fn versions() -> String {
    let version = |version: &str| format!("<Version>{version}</Version>");
    let supported: String = VERSIONS.into_iter().map(version).collect();
    let preferred = version(VERSIONS[0]);
    format!(
        "{DECLARATION}<Versions><Preferred>{preferred}</Preferred><Supported>{supported}</Supported></Versions>"
    )
}

/// Manifest that offers no agent.
pub(super) fn no_agents() -> String {
    format!("{DECLARATION}<PluginVersionManifest><Plugins></Plugins></PluginVersionManifest>")
}

/// Content of one VM's documents. Guests read them once per incarnation, and the goal state every few seconds.
#[derive(Debug)]
pub(super) struct WireserverState {
    incarnation: u64,
    container: Box<str>,
    /// Escaped, like the next two.
    instance: Box<str>,
    deployment: Box<str>,
    location: Box<str>,
    /// First known IPv4 address of the VM.
    address: Option<IpAddr>,
    public: Option<IpAddr>,
}

impl WireserverState {
    pub(super) fn of(record: &Record) -> Self {
        let addresses =
            given(&record.network).flat_map(|(_, nic, _)| known(nic, IpVersion::V4)).collect::<Vec<_>>();
        let public = addresses.iter().filter_map(|(address, _)| address.public);
        let boxed = |text: &str| escaped(text).into_boxed_str();
        Self {
            incarnation: record.generation,
            container: boxed(record.vm.uuid.as_str()),
            instance: boxed(record.vm.name.as_str()),
            deployment: boxed(record.vm.project.id.as_str()),
            location: boxed(record.placement.region.as_str()),
            address: addresses.first().map(|(_, cidr)| cidr.address),
            public: public.map(|public| public.0).find(IpAddr::is_ipv4),
        }
    }

    /// WALinuxAgent sends `ConfigName` to the plug-in in a header field and fails unless it is ASCII. Names of VMs
    /// and projects may be any text, so it is made of the UUID.
    pub(super) fn goal_state(&self) -> String {
        let Self { incarnation, container, instance, .. } = self;
        let version = VERSIONS[1];
        let [environment, shared, extensions] =
            ["HostingEnvironmentConfig", "SharedConfig", "ExtensionsConfig"]
                .map(|name| format!("<{name}>{}</{name}>", self.url(name)));
        format!(
            "{DECLARATION}<GoalState xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\" \
             xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\"><Version>{version}</Version>\
             <Incarnation>{incarnation}</Incarnation><Machine><ExpectedState>Started</ExpectedState>\
             <StopRolesDeadlineHint>300000</StopRolesDeadlineHint><LBProbePorts></LBProbePorts>\
             <ExpectHealthReport>FALSE</ExpectHealthReport></Machine><Container><ContainerId>{container}</ContainerId>\
             <RoleInstanceList><RoleInstance><InstanceId>{instance}</InstanceId><State>Started</State>\
             <Configuration>{environment}{shared}{extensions}\
             <ConfigName>{container}.{incarnation}.xml</ConfigName></Configuration>\
             </RoleInstance></RoleInstanceList></Container></GoalState>"
        )
    }

    /// Returns the URL of a document.
    fn url(&self, kind: &str) -> String {
        format!("{BASE}&amp;type={kind}&amp;incarnation={}", self.incarnation)
    }

    /// Returns the document of a kind that [`goal_state`](Self::goal_state) names. Ignores the case of `kind`.
    pub(super) fn config(&self, kind: &str) -> Option<String> {
        match kind.to_ascii_lowercase().as_str() {
            "hostingenvironmentconfig" => Some(self.hosting_environment()),
            "sharedconfig" => Some(self.shared()),
            "extensionsconfig" => Some(self.extensions()),
            "gamanifest" => Some(no_agents()),
            _ => None,
        }
    }

    /// Returns the members with which both configurations begin.
    fn deployed(&self) -> String {
        let Self { incarnation, container, instance, deployment, .. } = self;
        format!(
            "<Deployment name=\"{deployment}\" guid=\"{{{container}}}\" incarnation=\"{incarnation}\"></Deployment>\
             <Incarnation number=\"{incarnation}\" instance=\"{instance}\" guid=\"{{{container}}}\"/>\
             <Role guid=\"{{{container}}}\" name=\"{instance}\" settleTimeSeconds=\"0\"/>"
        )
    }

    fn hosting_environment(&self) -> String {
        format!(
            "{DECLARATION}<HostingEnvironmentConfig version=\"1.0.0.0\" goalStateIncarnation=\"{}\">\
             <StoredCertificates></StoredCertificates>{}</HostingEnvironmentConfig>",
            self.incarnation,
            self.deployed()
        )
    }

    fn shared(&self) -> String {
        let endpoint = |(address, public): (IpAddr, IpAddr)| {
            let [address, public] = [address, public].map(|address| SocketAddr::new(address, ENDPOINT_PORT));
            format!(
                "<Endpoint name=\"SSH\" address=\"{address}\" protocol=\"tcp\" isPublic=\"true\" \
                 loadBalancedPublicAddress=\"{public}\"/>"
            )
        };
        // Afterburn fails on an instance without an address.
        let instance = self.address.map_or_else(String::new, |address| {
            format!(
                "<Instance id=\"{}\" address=\"{address}\"><InputEndpoints>{}</InputEndpoints></Instance>",
                self.instance,
                self.public.map_or_else(String::new, |public| endpoint((address, public)))
            )
        });
        format!(
            "{DECLARATION}<SharedConfig version=\"1.0.0.0\" goalStateIncarnation=\"{}\">{}\
             <Instances>{instance}</Instances></SharedConfig>",
            self.incarnation,
            self.deployed()
        )
    }

    fn extensions(&self) -> String {
        format!(
            "{DECLARATION}<Extensions version=\"1.0.0.0\" goalStateIncarnation=\"{}\"><GuestAgentExtension>\
             <GAFamilies><GAFamily><Name>{FAMILY}</Name><Uris><Uri>{}</Uri></Uris></GAFamily></GAFamilies>\
             <Location>{}</Location></GuestAgentExtension><Plugins></Plugins><PluginSettings></PluginSettings>\
             <StatusUploadBlob statusBlobType=\"BlockBlob\">{STATUS_URL}</StatusUploadBlob></Extensions>",
            self.incarnation,
            self.url("gaManifest"),
            self.location
        )
    }
}

/// Escapes text for an XML element or a double-quoted attribute (XML 1.0 sections 2.2 and 2.4).
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // XML excludes these two characters. A record has no control characters.
            '\u{fffe}' | '\u{ffff}' => escaped.push(char::REPLACEMENT_CHARACTER),
            other => escaped.push(other),
        }
    }
    escaped
}

// WALinuxAgent's host plug-in, 168.63.129.16 port 32526. It accepts the agent's reports and offers nothing else.
//
// `/vmSettings` is 404: the agent reads that as "not supported" and uses the goal state. It treats any other answer,
// and no answer, as a failure (`hostplugin.py`). There are no extensions, so there is no `/extensionArtifact`.

/// URL for the agent's status, which [`WireserverState::goal_state`] contains. The agent uses it with and without the
/// plug-in.
pub(super) const STATUS_URL: &str = "http://168.63.129.16:32526/status";
const _: () = assert!(HOST_PLUGIN_PORT == 32_526);

/// Version of the plug-in's interface that the agent requires.
const PLUGIN_VERSIONS: &str = r#"["2015-09-01"]"#;

static REPORT_TAKEN: LazyLock<Response> =
    LazyLock::new(|| Response::new(StatusCode(201), Some(TEXT), &[], ""));

pub(super) fn render_host_plugin(routes: &mut RouteBuilder<'_>) {
    let versions = routes.found(JSON, PLUGIN_VERSIONS);
    routes.guarded("/versions", &*GUARDS, versions);
    let healthy = routes.found(TEXT, "");
    routes.guarded("/health", &*GUARDS, healthy);
    for path in ["/status", "/vmAgentLog"] {
        // The agent's reports.
        let reports = computed("accepted and dropped", |_| REPORT_TAKEN.clone());
        routes.live(path, Methods::of(&[Method::Put]), &*GUARDS, reports);
    }
}

#[cfg(test)]
mod tests {
    //! Requests of agents to the wireserver and to the host plug-in.
    use roxmltree::Document;
    use serde_json::{Value, json};

    use crate::dialect::tests::{DialectGuest, TestRequest, bare, full, text};
    use crate::http::target::normalise;
    use crate::http::{Method, Response};
    use crate::store::path::HOST_PLUGIN_PORT;

    const WIRESERVER: (&str, u16) = ("168.63.129.16", 80);
    const HOST_PLUGIN: (&str, u16) = ("168.63.129.16", HOST_PLUGIN_PORT);

    fn ask(guest: &DialectGuest, at: (&str, u16), method: Method, target: &str) -> Response {
        guest.ask_at(at, method, target, &[])
    }

    /// Returns the document at a URL of the wireserver.
    fn read(guest: &DialectGuest, url: &str) -> String {
        let target = url.strip_prefix("http://168.63.129.16").expect("a URL of the wireserver");
        let target = normalise(target).expect("a target");
        let request = TestRequest::new(Method::Get, "/", &[]);
        let request = TestRequest { local: WIRESERVER, target: target.target(), ..request };
        let response = request.answer(guest.responses());
        assert_eq!(response.status().0, 200, "{url}");
        assert_eq!(response.field("Content-Type"), Some("text/xml; charset=utf-8"), "{url}");
        text(&response)
    }

    const GOAL_STATE: &str = "http://168.63.129.16/machine/?comp=goalstate";

    /// Returns the text of the only element with a name.
    fn element<'a>(document: &'a Document<'_>, name: &str) -> &'a str {
        let mut all = document.descendants().filter(|node| node.has_tag_name(name));
        let first = all.next().unwrap_or_else(|| panic!("no {name}"));
        assert!(all.next().is_none(), "{name} twice");
        first.text().unwrap_or_default()
    }

    /// Returns an attribute of the first element with a name.
    fn attribute(document: &Document<'_>, element: &str, name: &str) -> Option<String> {
        let node = document.descendants().find(|node| node.has_tag_name(element))?;
        node.attribute(name).map(str::to_owned)
    }

    /// Returns the document of one kind, found through the goal state.
    fn configuration(guest: &DialectGuest, kind: &str) -> String {
        let goal_state = read(guest, GOAL_STATE);
        let goal_state = Document::parse(&goal_state).expect("a goal state");
        read(guest, element(&goal_state, kind))
    }

    #[test]
    fn the_wireserver_accepts_the_requests_of_its_clients() {
        let guest = DialectGuest::of(&full());
        for (method, target, status) in [
            (Method::Head, "/?COMP=VERSIONS", 200),
            (Method::Get, "/", 404),
            (Method::Get, "/?comp=other", 404),
            (Method::Get, "/machine?type=x&comp=GoalState", 200),
            (Method::Get, "/machine?comp=config&type=sharedConfig&incarnation=1", 200),
            (Method::Get, "/machine?comp=config&type=fullConfig", 404),
            (Method::Get, "/machine?comp=config", 404),
            (Method::Get, "/machine?comp=certificates", 404),
            (Method::Post, "/machine?comp=health", 200),
            (Method::Post, "/machine?comp=RoleProperties", 202),
            (Method::Post, "/machine?comp=telemetrydata", 200),
            (Method::Post, "/HealthService", 200),
            (Method::Post, "/provisioning/health", 201),
            (Method::Get, "/machine", 404),
            (Method::Get, "/machine?comp=health", 405),
            (Method::Get, "/machine?comp=telemetrydata", 405),
            (Method::Post, "/machine?comp=goalstate", 405),
            (Method::Post, "/machine?comp=config&type=sharedConfig", 405),
            (Method::Get, "/provisioning/health", 405),
            (Method::Get, "/HealthService", 405),
            (Method::Get, "/metadata/instance", 404),
            (Method::Get, "/vmSettings", 404),
            (Method::Get, "/versions", 404),
        ] {
            let answer = ask(&guest, WIRESERVER, method, target);
            assert_eq!(answer.status().0, status, "{target}");
            assert_eq!(answer.field("Allow").is_some(), status == 405, "{target}");
        }
        let elsewhere = ask(&guest, ("169.254.169.254", 80), Method::Get, "/machine?comp=goalstate");
        assert_eq!(elsewhere.status().0, 404, "the wireserver has its own address");
    }

    #[test]
    fn the_host_plug_in_accepts_reports_and_has_no_settings() {
        let guest = DialectGuest::of(&full());
        for (method, target, status) in [
            (Method::Get, "/versions", 200),
            (Method::Get, "/health", 200),
            (Method::Get, "/vmSettings", 404),
            (Method::Get, "/extensionArtifact", 404),
            (Method::Put, "/status", 201),
            (Method::Put, "/status?comp=page", 201),
            (Method::Put, "/vmAgentLog", 201),
            (Method::Get, "/status", 405),
            (Method::Get, "/machine?comp=goalstate", 404),
        ] {
            assert_eq!(ask(&guest, HOST_PLUGIN, method, target).status().0, status, "{target}");
        }
        let versions = text(&ask(&guest, HOST_PLUGIN, Method::Get, "/versions"));
        assert_eq!(serde_json::from_str::<Value>(&versions).expect("JSON"), json!(["2015-09-01"]));
        let proxied = [("X-Forwarded-For", "10.0.0.1")];
        assert_eq!(guest.ask_at(HOST_PLUGIN, Method::Get, "/health", &proxied).status().0, 400);
    }

    #[test]
    fn the_goal_state_names_each_configuration_that_agents_fetch() {
        let guest = DialectGuest::of(&full());
        let goal_state = read(&guest, GOAL_STATE);
        let goal_state = Document::parse(&goal_state).expect("a goal state");
        assert_eq!(element(&goal_state, "Version"), "2012-11-30");
        assert_eq!(element(&goal_state, "Incarnation"), "7");
        assert_eq!(element(&goal_state, "ConfigName"), "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d.7.xml");
        assert!(!goal_state.descendants().any(|node| node.has_tag_name("Certificates")));
        let environment = configuration(&guest, "HostingEnvironmentConfig");
        let environment = Document::parse(&environment).expect("a document");
        for (element, name, value) in
            [("Incarnation", "instance", "web-1"), ("Role", "name", "web-1"), ("Deployment", "name", "p1")]
        {
            assert_eq!(attribute(&environment, element, name).as_deref(), Some(value), "{element}");
        }
        let extensions = configuration(&guest, "ExtensionsConfig");
        let extensions = Document::parse(&extensions).expect("a document");
        assert_eq!(element(&extensions, "StatusUploadBlob"), "http://168.63.129.16:32526/status");
        assert_eq!(
            attribute(&extensions, "StatusUploadBlob", "statusBlobType").as_deref(),
            Some("BlockBlob"),
            "the agent knows this type and page blobs"
        );
        assert_eq!(element(&extensions, "Plugins"), "");
        let manifest = read(&guest, element(&extensions, "Uri"));
        let manifest = Document::parse(&manifest).expect("a document");
        assert_eq!(element(&manifest, "Plugins"), "", "no newer agent is offered");
    }

    #[test]
    fn the_shared_configuration_has_the_known_addresses() {
        let shared = |record: &Value| {
            let document = configuration(&DialectGuest::of(record), "SharedConfig");
            let document = Document::parse(&document).expect("a document");
            assert_eq!(document.descendants().filter(|node| node.has_tag_name("Instances")).count(), 1);
            let own = attribute(&document, "Incarnation", "instance");
            if let Some(id) = attribute(&document, "Instance", "id") {
                assert_eq!(Some(id), own, "Afterburn finds its instance by this id");
                assert_eq!(
                    document.descendants().filter(|node| node.has_tag_name("InputEndpoints")).count(),
                    1
                );
            }
            [
                attribute(&document, "Instance", "address"),
                attribute(&document, "Endpoint", "loadBalancedPublicAddress"),
            ]
        };
        let both = ["10.0.2.15", "203.0.113.7:22"].map(|address| Some(address.to_owned()));
        assert_eq!(shared(&full()), both);
        assert_eq!(shared(&bare()), [None, None]);
        let mut record = bare();
        let addresses = |addresses: Value| json!({ "nics": [{ "id": "n0", "mac": "52:54:00:ab:cd:ef", "addresses": addresses }] });
        record["network"] = addresses(json!([{ "method": "dhcp4" }, { "method": "dhcp6" }]));
        assert_eq!(shared(&record), [None, None]);
        record["network"] = addresses(json!([{ "method": "static", "address": "10.1.2.3/24" }]));
        assert_eq!(shared(&record), [Some("10.1.2.3".to_owned()), None]);
    }

    #[test]
    fn names_are_escaped_in_every_document() {
        let mut record = full();
        let name = "<a> & \"b\" \u{1f680} \u{ffff}";
        record["vm"]["name"] = json!(name);
        record["vm"]["project"]["id"] = json!(name);
        record["placement"]["region"] = json!(name);
        record["generation"] = json!(12_345_678_901_u64);
        let guest = DialectGuest::of(&record);
        let name = "<a> & \"b\" \u{1f680} \u{fffd}";
        let goal_state = read(&guest, GOAL_STATE);
        let goal_state = Document::parse(&goal_state).expect("a goal state");
        assert_eq!(element(&goal_state, "InstanceId"), name);
        assert_eq!(element(&goal_state, "Incarnation"), "12345678901");
        assert!(
            element(&goal_state, "ConfigName").bytes().all(|b| b.is_ascii_graphic()),
            "the agent sends it in a header field"
        );
        for kind in ["HostingEnvironmentConfig", "SharedConfig"] {
            let document = configuration(&guest, kind);
            let document = Document::parse(&document).expect("a document");
            assert_eq!(attribute(&document, "Role", "name").as_deref(), Some(name), "{kind}");
            assert_eq!(attribute(&document, "Deployment", "name").as_deref(), Some(name), "{kind}");
        }
        let extensions = configuration(&guest, "ExtensionsConfig");
        assert_eq!(element(&Document::parse(&extensions).expect("a document"), "Location"), name);
    }

    #[test]
    fn an_image_has_its_azure_names_or_empty_ones() {
        const NAMES: [&str; 4] = ["publisher", "offer", "sku", "version"];
        let compute = |record: &Value| {
            let guest = DialectGuest::of(record);
            NAMES.map(|name| {
                let path = format!("/metadata/instance/compute/{name}");
                let target = format!("{path}?api-version=2021-08-01&format=text");
                let fields = [("Metadata", "true")];
                let response = guest.ask(Method::Get, &target, &fields);
                assert_eq!(response.status().0, 200, "{name}");
                text(&response)
            })
        };
        assert_eq!(compute(&full()), [""; 4]);
        assert_eq!(compute(&bare()), [""; 4]);
        let mut record = full();
        for (n, name) in NAMES.into_iter().enumerate() {
            record["image"][name] = json!(format!("v{n}"));
        }
        assert_eq!(compute(&record), ["v0", "v1", "v2", "v3"]);
    }

    #[test]
    fn only_guests_of_azure_have_the_host_plug_in() {
        use crate::store::Host;
        assert!(DialectGuest::of(&full()).responses().has(Host::HostPlugin));
        let mut record = full();
        record["serve"]["dialects"] = json!(["nocloud", "ec2"]);
        assert!(!DialectGuest::of(&record).responses().has(Host::HostPlugin));
        record["serve"]["dialects"] = json!(["azure"]);
        assert!(DialectGuest::of(&record).responses().has(Host::HostPlugin));
    }
}
