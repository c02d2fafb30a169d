//! The wireserver, 168.63.129.16: serves the goal state and accepts reports that a guest is ready.

use std::sync::LazyLock;

use super::super::sheet::{JSON, Sheet};
use super::goal_state::{State, versions};
use crate::http::{Method, Response, Status};
use crate::record::Record;
use crate::sink::MessageKind;
use crate::store::{Call, Condition, Guard, Live, Methods, Outcome};

const XML: &str = "text/xml; charset=utf-8";

/// Versions of the protocol, the preferred one first. Afterburn and WALinuxAgent require the second.
pub(super) const VERSIONS: [&str; 2] = ["2015-04-05", "2012-11-30"];

pub(super) static GUARDS: LazyLock<[Guard; 1]> = LazyLock::new(|| {
    [Guard {
        condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
        otherwise: Response::error(Status(400), &[]),
    }]
});

static TAKEN: LazyLock<Response> = LazyLock::new(|| Response::new(Status(200), Some(XML), &[], ""));
/// WALinuxAgent accepts no other success for role properties.
static ACCEPTED: LazyLock<Response> = LazyLock::new(|| Response::new(Status(202), Some(XML), &[], ""));
static PROVISIONED: LazyLock<Response> = LazyLock::new(|| Response::new(Status(201), Some(JSON), &[], "{}"));

const POST: Methods = Methods::of(&[Method::Post]);

pub(super) fn render(record: &Record, sheet: &mut Sheet<'_>) {
    let versions = sheet.found(XML, versions());
    sheet.live("/", Methods::READ, &*GUARDS, Root { versions });
    let state = State::of(record);
    let goal_state = sheet.own(XML, state.goal_state());
    let both = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    sheet.live("/machine", both, &*GUARDS, Machine { goal_state, state });
    sheet.live("/provisioning/health", POST, &*GUARDS, Provisioning);
    sheet.live("/HealthService", POST, &*GUARDS, Observations);
}

/// Returns the value of a parameter. The name matches in any case.
fn parameter<'a>(call: &Call<'a>, named: &str) -> Option<std::borrow::Cow<'a, str>> {
    let mut parameters = form_urlencoded::parse(call.request.target.query.as_bytes());
    let found = parameters.find(|(name, _)| name.eq_ignore_ascii_case(named));
    found.map(|(_, value)| value)
}

/// Returns the value of `comp` in lower case.
fn comp(call: &Call<'_>) -> String {
    parameter(call, "comp").map_or_else(String::new, |value| value.to_ascii_lowercase())
}

fn not_found() -> Outcome {
    Response::error(Status(404), &[]).into()
}

/// Forwards a guest's report. The guest gets a success even if the report is dropped.
fn forward(call: &Call<'_>) {
    let mailbox = &call.vm.mailbox;
    mailbox.send(&call.vm.sinks, MessageKind::Ready, call.request.body, call.now.unix_seconds);
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
    state: State,
}

impl Machine {
    fn config(&self, call: &Call<'_>) -> Outcome {
        let document = parameter(call, "type").and_then(|kind| self.state.config(&kind));
        document.map_or_else(not_found, |text| Response::new(Status(200), Some(XML), &[], text).into())
    }
}

impl Live for Machine {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        let posts = call.request.method == Method::Post;
        let only = |allowed| Response::error(Status(405), &[("Allow", allowed)]).into();
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

impl Live for Provisioning {
    fn answer(&self, call: &Call<'_>) -> Outcome {
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

impl Live for Observations {
    fn answer(&self, _: &Call<'_>) -> Outcome {
        TAKEN.clone().into()
    }

    fn about(&self) -> &'static str {
        "accepted and dropped"
    }
}
