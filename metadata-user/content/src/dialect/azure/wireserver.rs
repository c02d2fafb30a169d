//! The wireserver, 168.63.129.16: serves the goal state and accepts reports that a guest is ready.

use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;

use super::super::route_builder::{JSON, RouteBuilder, TEXT};
use crate::dialect::record_values::{IpVersion, given, known};
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

pub(super) fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let versions = sheet.found(XML, versions());
    sheet.live("/", Methods::READ, &*GUARDS, Root { versions });
    let state = WireserverState::of(record);
    let goal_state = sheet.own(XML, state.goal_state());
    let both = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    sheet.live("/machine", both, &*GUARDS, Machine { goal_state, state });
    sheet.live("/provisioning/health", POST, &*GUARDS, Provisioning);
    sheet.live("/HealthService", POST, &*GUARDS, Observations);
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

/// `/?comp=versions`.
#[derive(Debug)]
struct Root {
    versions: Response,
}

impl LiveRoute for Root {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        match comp(call).as_str() {
            "versions" => self.versions.clone().into(),
            _ => not_found(),
        }
    }

    fn about(&self) -> &'static str {
        "versions of the protocol, for comp=versions"
    }
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

/// `/provisioning/health`, azure-init's report.
#[derive(Debug)]
struct Provisioning;

impl LiveRoute for Provisioning {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        forward(call);
        PROVISIONED.clone().into()
    }

    fn about(&self) -> &'static str {
        "report to sinks.ready"
    }
}

/// `/HealthService`: WALinuxAgent's observations of this server, once a minute.
#[derive(Debug)]
struct Observations;

impl LiveRoute for Observations {
    fn answer(&self, _: &LiveRequest<'_>) -> LiveOutcome {
        TAKEN.clone().into()
    }

    fn about(&self) -> &'static str {
        "accepted and dropped"
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

/// `<Versions>`.
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

/// URL for the agent's status, which [`goal_state`](super::wireserver) contains. The agent uses it with and without the
/// plug-in.
pub(super) const STATUS_URL: &str = "http://168.63.129.16:32526/status";
const _: () = assert!(HOST_PLUGIN_PORT == 32_526);

/// Version of the plug-in's interface that the agent requires.
const PLUGIN_VERSIONS: &str = r#"["2015-09-01"]"#;

static REPORT_TAKEN: LazyLock<Response> =
    LazyLock::new(|| Response::new(StatusCode(201), Some(TEXT), &[], ""));

pub(super) fn render_host_plugin(sheet: &mut RouteBuilder<'_>) {
    let versions = sheet.found(JSON, PLUGIN_VERSIONS);
    sheet.guarded("/versions", &*GUARDS, versions);
    let healthy = sheet.found(TEXT, "");
    sheet.guarded("/health", &*GUARDS, healthy);
    for path in ["/status", "/vmAgentLog"] {
        sheet.live(path, Methods::of(&[Method::Put]), &*GUARDS, AgentReports);
    }
}

/// Accepts reports of the agent and drops them.
#[derive(Debug)]
struct AgentReports;

impl LiveRoute for AgentReports {
    fn answer(&self, _: &LiveRequest<'_>) -> LiveOutcome {
        REPORT_TAKEN.clone().into()
    }

    fn about(&self) -> &'static str {
        "accepted and dropped"
    }
}
