//! The wireserver, 168.63.129.16: the goal state guests ask for, and where they report that they are ready.

use std::sync::LazyLock;

use super::super::sheet::{JSON, Sheet};
use crate::http::{Method, Response, Status};
use crate::record::Record;
use crate::sink::MessageKind;
use crate::store::{Call, Condition, Guard, Live, Methods, Outcome};

const XML: &str = "text/xml; charset=utf-8";
const DECLARATION: &str = "<?xml version=\"1.0\" encoding=\"utf-8\"?>";

/// Of the protocol, the preferred first. Afterburn insists on the second.
const VERSIONS: [&str; 2] = ["2015-04-05", "2012-11-30"];

static GUARDS: LazyLock<[Guard; 1]> = LazyLock::new(|| {
    [Guard {
        condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
        otherwise: Response::error(Status(400), &[]),
    }]
});

static READY: LazyLock<Response> = LazyLock::new(|| Response::new(Status(200), Some(XML), &[], ""));
static PROVISIONED: LazyLock<Response> = LazyLock::new(|| Response::new(Status(201), Some(JSON), &[], "{}"));

pub(super) fn render(record: &Record, sheet: &mut Sheet<'_>) {
    let versions = sheet.found(XML, versions());
    sheet.live("/", Methods::READ, &*GUARDS, Root { versions });
    let goal_state = sheet.found(XML, goal_state(record));
    let both = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    sheet.live("/machine", both, &*GUARDS, Machine { goal_state });
    sheet.live("/provisioning/health", Methods::of(&[Method::Post]), &*GUARDS, Provisioning);
}

fn versions() -> String {
    let version = |version: &str| format!("<Version>{version}</Version>");
    let supported: String = VERSIONS.into_iter().map(version).collect();
    let preferred = version(VERSIONS[0]);
    format!(
        "{DECLARATION}<Versions><Preferred>{preferred}</Preferred><Supported>{supported}</Supported></Versions>"
    )
}

/// No certificates and no configuration: what guests are told is in the instance document.
fn goal_state(record: &Record) -> String {
    format!(
        "{DECLARATION}<GoalState xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\" \
         xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\"><Version>{version}</Version>\
         <Incarnation>{incarnation}</Incarnation><Machine><ExpectedState>Started</ExpectedState>\
         <StopRolesDeadlineHint>300000</StopRolesDeadlineHint><LBProbePorts></LBProbePorts>\
         <ExpectHealthReport>FALSE</ExpectHealthReport></Machine><Container><ContainerId>{container}</ContainerId>\
         <RoleInstanceList><RoleInstance><InstanceId>{instance}</InstanceId><State>Started</State>\
         <Configuration></Configuration></RoleInstance></RoleInstanceList></Container></GoalState>",
        version = VERSIONS[1],
        incarnation = record.generation,
        container = record.vm.uuid,
        instance = escaped(record.vm.name.as_str()),
    )
}

/// Text for an XML element (XML 1.0 §2.4).
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The value of `comp`, in lower case.
fn comp(call: &Call<'_>) -> String {
    let mut parameters = form_urlencoded::parse(call.request.target.query.as_bytes());
    let comp = parameters.find(|(name, _)| name.eq_ignore_ascii_case("comp"));
    comp.map_or_else(String::new, |(_, value)| value.to_ascii_lowercase())
}

fn not_found() -> Outcome {
    Response::error(Status(404), &[]).into()
}

/// Hands on what the guest reports. It hears of success whatever becomes of that.
fn tell(call: &Call<'_>) {
    let mailbox = &call.vm.mailbox;
    mailbox.tell(&call.vm.sinks, MessageKind::Ready, call.request.body, call.now.unix_seconds);
}

/// `/?comp=versions`.
#[derive(Debug)]
struct Root {
    versions: Response,
}

impl Live for Root {
    fn answer(&self, call: &Call<'_>) -> Outcome {
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
}

impl Live for Machine {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        let posts = call.request.method == Method::Post;
        let only = |allowed| Response::error(Status(405), &[("Allow", allowed)]).into();
        match (comp(call).as_str(), posts) {
            ("goalstate", false) => self.goal_state.clone().into(),
            ("goalstate", true) => only("GET, HEAD"),
            ("health" | "roleproperties", true) => {
                tell(call);
                READY.clone().into()
            }
            ("health" | "roleproperties", false) => only("POST"),
            _ => not_found(),
        }
    }

    fn about(&self) -> &'static str {
        "goal state, and reports to sinks.ready"
    }
}

/// `/provisioning/health`, azure-init's report.
#[derive(Debug)]
struct Provisioning;

impl Live for Provisioning {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        tell(call);
        PROVISIONED.clone().into()
    }

    fn about(&self) -> &'static str {
        "report to sinks.ready"
    }
}
