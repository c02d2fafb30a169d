//! The terminal view of a node, as `xdp-imds top` shows it.
//!
//! ```text
//!  agent ── Top, VmPage (crate::top) ──► Screen ── draw ──► Buffer ──► terminal | plain text
//!                                    keys ──────────►│
//! ```
//!
//! [`Screen`] is the state: the last documents, what is shown, and what to ask next. [`draw::draw`] makes cells of it,
//! and tests compare these. Only [`terminal`] knows a real terminal, and only [`fetch()`] the agent.

pub mod draw;
pub mod terminal;

pub use draw::{plain, printed};
pub use terminal::TerminalStyle;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::path::Path;

use crate::status::ClientError;
use crate::top::{self, Top, TopQuery, VmPage, VmRow, WORDS_MOST};

/// Number of VMs that the view asks for.
pub const LISTED: usize = 256;

/// What is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ScreenContent {
    /// The node and its VMs.
    #[default]
    Node,
    /// The page of the VMs with this name, MAC or port.
    Vm(String),
    /// The keys.
    Help,
}

/// What to ask the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViewQuery {
    /// The node and its VMs.
    pub node: TopQuery,
    /// Also the pages of a VM.
    pub vm: Option<TopQuery>,
}

/// What the agent has answered.
#[derive(Clone, Debug, Default)]
pub struct Documents {
    /// The node and its VMs.
    pub top: Top,
    /// The pages of a VM, with the name that was asked for.
    pub vm: Option<(String, Vec<VmPage>)>,
}

/// The state of the view.
#[derive(Clone, Debug, Default)]
pub struct Screen {
    /// The last answer; `None` before the first.
    pub documents: Option<Documents>,
    /// Why there is no newer answer.
    pub away: Option<String>,
    /// What is shown.
    pub shown: ScreenContent,
    /// Order and filter.
    pub query: TopQuery,
    /// The selected VM, by its place in the list.
    pub selected: usize,
    /// The filter as it is typed.
    pub typed: Option<String>,
}

impl Screen {
    /// A view with an order and a filter.
    #[must_use]
    pub fn new(query: TopQuery) -> Self {
        Self { query, ..Self::default() }
    }

    /// What to ask next.
    #[must_use]
    pub fn asked(&self) -> ViewQuery {
        let vm = match &self.shown {
            ScreenContent::Vm(name) => Some(TopQuery { guest: Some(name.clone()), ..TopQuery::default() }),
            ScreenContent::Node | ScreenContent::Help => None,
        };
        let node =
            TopQuery { limit: Some(self.query.limit.unwrap_or(LISTED)), guest: None, ..self.query.clone() };
        ViewQuery { node, vm }
    }

    /// Takes an answer, or the reason why there is none. The selection stays on its VM.
    pub fn on_answer(&mut self, answer: Result<Documents, String>) {
        match answer {
            Ok(documents) => {
                let chosen = self.chosen().map(|row| (row.port.clone(), row.mac.clone()));
                let is_chosen = |row: &VmRow| {
                    chosen.as_ref().is_some_and(|(port, mac)| (&row.port, &row.mac) == (port, mac))
                };
                // The first line stays selected, so that the newest VM is in view.
                if self.selected > 0
                    && let Some(at) = documents.top.vms.iter().position(is_chosen)
                {
                    self.selected = at;
                }
                self.selected = self.selected.min(documents.top.vms.len().saturating_sub(1));
                self.documents = Some(documents);
                self.away = None;
            }
            Err(reason) => self.away = Some(reason),
        }
    }

    /// The node's last document.
    #[must_use]
    pub fn top(&self) -> Option<&Top> {
        self.documents.as_ref().map(|documents| &documents.top)
    }

    /// The pages of the VM that is shown, if they have arrived.
    #[must_use]
    pub fn pages(&self, name: &str) -> Option<&[VmPage]> {
        let (asked, pages) = self.documents.as_ref()?.vm.as_ref()?;
        (asked == name).then_some(pages)
    }

    /// The selected VM.
    #[must_use]
    pub fn chosen(&self) -> Option<&VmRow> {
        self.top()?.vms.get(self.selected)
    }

    /// Moves the selection.
    pub(crate) fn select(&mut self, at: usize) {
        let most = self.top().map_or(0, |top| top.vms.len().saturating_sub(1));
        self.selected = at.min(most);
    }

    /// Adds a character to the typed filter.
    pub(crate) fn type_in(&mut self, letter: char) {
        if let Some(typed) = &mut self.typed
            && typed.len() + letter.len_utf8() <= WORDS_MOST
        {
            typed.push(letter);
        }
    }
}

// Keys.

/// Lines that a page key moves.
const PAGE: usize = 10;

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
    /// Nothing.
    Nothing,
    /// Draw again.
    Draw,
    /// Ask the agent at once, and draw.
    Ask,
    /// End the view.
    Quit,
    /// End the view, and what it shows if that was started with it.
    Interrupt,
}

impl Screen {
    /// Handles a key.
    pub fn on_key(&mut self, key: KeyEvent) -> KeyAction {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => KeyAction::Interrupt,
                KeyCode::Char('l') => KeyAction::Draw,
                _ => KeyAction::Nothing,
            };
        }
        if self.typed.is_some() {
            return self.on_typed(key.code);
        }
        match (key.code, &self.shown) {
            (KeyCode::Char('q'), ScreenContent::Node) => return KeyAction::Quit,
            (
                KeyCode::Char('q') | KeyCode::Esc | KeyCode::Backspace | KeyCode::Left,
                ScreenContent::Vm(_) | ScreenContent::Help,
            )
            | (KeyCode::Char('?' | 'h'), ScreenContent::Help) => {
                self.shown = ScreenContent::Node;
            }
            (KeyCode::Char('?' | 'h'), _) => self.shown = ScreenContent::Help,
            (_, ScreenContent::Vm(_) | ScreenContent::Help) => return KeyAction::Nothing,
            (KeyCode::Char('/'), ScreenContent::Node) => self.typed = Some(self.query.filter.clone()),
            (KeyCode::Char('s'), ScreenContent::Node) => {
                self.query.sort = self.query.sort.next();
                self.selected = 0;
                return KeyAction::Ask;
            }
            (KeyCode::Esc, ScreenContent::Node) if !self.query.filter.is_empty() => {
                self.query.filter.clear();
                return KeyAction::Ask;
            }
            (KeyCode::Enter | KeyCode::Right, ScreenContent::Node) => {
                let Some(row) = self.chosen() else { return KeyAction::Nothing };
                self.shown = ScreenContent::Vm(row.mac.clone());
                return KeyAction::Ask;
            }
            (code, ScreenContent::Node) => return self.on_move(code),
        }
        KeyAction::Draw
    }

    fn on_move(&mut self, code: KeyCode) -> KeyAction {
        let at = match code {
            KeyCode::Down | KeyCode::Char('j') => self.selected + 1,
            KeyCode::Up | KeyCode::Char('k') => self.selected.saturating_sub(1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.selected + PAGE,
            KeyCode::PageUp => self.selected.saturating_sub(PAGE),
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => usize::MAX,
            _ => return KeyAction::Nothing,
        };
        self.select(at);
        KeyAction::Draw
    }

    /// A key while the filter is typed.
    fn on_typed(&mut self, code: KeyCode) -> KeyAction {
        match code {
            KeyCode::Enter => {
                self.query.filter = self.typed.take().unwrap_or_default();
                self.selected = 0;
                return KeyAction::Ask;
            }
            KeyCode::Esc => self.typed = None,
            KeyCode::Backspace => _ = self.typed.as_mut().and_then(String::pop),
            KeyCode::Char(letter) => self.type_in(letter),
            _ => return KeyAction::Nothing,
        }
        KeyAction::Draw
    }
}

/// Asks the agent of a run directory.
///
/// # Errors
/// [`ClientError`] without an answer.
pub fn fetch(run: &Path, asked: &ViewQuery) -> Result<Documents, ClientError> {
    let top = top::fetch(run, &asked.node)?;
    let vm = match &asked.vm {
        Some(query) => Some((query.guest.clone().unwrap_or_default(), top::fetch(run, query)?)),
        None => None,
    };
    Ok(Documents { top, vm })
}

#[cfg(test)]
mod tests {
    //! Screens, as text and key by key.
    //!
    //! `golden/` has the screens. With `XDP_IMDS_WRITE_SCREENS=1` the tests write them again; read the difference before
    //! you commit it.

    use std::path::Path;

    use crate::status::{GuestUsage, Phase, WorkerStatus};
    use crate::top::{
        BootStage, DropCount, LatencyFigures, SeenRequest, Top, TopQuery, Traffic, VmOrder, VmPage, VmRow,
    };
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
    use ratatui::style::Color;

    use crate::screen::{
        Documents, KeyAction, LISTED, Screen, ScreenContent, TerminalStyle, ViewQuery, draw, plain, printed,
    };

    const ASCII: TerminalStyle = TerminalStyle::PLAIN;
    const UNICODE: TerminalStyle = TerminalStyle { colour: false, unicode: true };
    const COLOUR: TerminalStyle = TerminalStyle { colour: true, unicode: true };

    fn row(number: u32, stage: BootStage) -> VmRow {
        VmRow {
            vm: Some(format!("web-{number}")),
            uuid: Some(format!("7c0f1a52-3b5e-4d1a-9d2c-0000000000{number:02}")),
            port: format!("vnet{number}"),
            mac: format!("52:54:00:00:00:{number:02x}"),
            stage,
            ..VmRow::default()
        }
    }

    fn asked(number: u32, stage: BootStage, requests: u64, (path, status): (&str, u16)) -> VmRow {
        VmRow {
            dialect: Some("nocloud".into()),
            first: Some(f64::from(number) + 0.5),
            boot: Some(f64::from(number) + 0.5),
            last: Some(f64::from(number) / 4.0),
            requests,
            has_user_data: path.ends_with("user-data"),
            path: Some(path.into()),
            status: Some(status),
            ..row(number, stage)
        }
    }

    fn worker(hub: u32, load: f64) -> WorkerStatus {
        WorkerStatus {
            hub,
            device: format!("imdsw{hub}"),
            heartbeat: Some(0.1),
            load,
            connections: 120,
            guests: 80,
            requests: 9,
        }
    }

    fn node() -> Top {
        let dropped =
            |reason: &str, count, per_second| DropCount { reason: reason.into(), count, per_second };
        let limited = VmRow {
            waits_for: Some("its request rate".into()),
            failed: 3,
            ..asked(2, BootStage::Asking, 412, ("/latest/meta-data/", 429))
        };
        let unrecorded = VmRow {
            waits_for: Some("its record".into()),
            vm: None,
            uuid: None,
            ..row(7, BootStage::Unrecorded)
        };
        let absent = "no such interface yet; it is attached as soon as it appears";
        let absent = VmRow { waits_for: Some(absent.into()), ..row(8, BootStage::Unattached) };
        let failing = "answers do not reach the guest: the device accepts no redirected frames";
        let failing =
            VmRow { waits_for: Some(failing.into()), port_error: true, ..row(6, BootStage::Unattached) };
        let long = VmRow {
            vm: Some("a-name-that-is-longer-than-its-column".into()),
            ..asked(3, BootStage::Quiet, 4, ("/v1/vendor-data", 200))
        };
        Top {
            schema: crate::top::SCHEMA.into(),
            version: "0.1.0".into(),
            node: "hv-1".into(),
            uptime: 11_520.0,
            phase: Phase::Serving,
            followed: 42.0,
            troubles: vec!["the kernel has no room for another port".into()],
            traffic: Traffic {
                requests: 1_234_567,
                per_second: Some(12_345.0),
                failed_per_second: Some(2.5),
                history: (0..60).map(|second| second * second).collect(),
            },
            latency: Some(LatencyFigures {
                over: 10.0,
                answers: 98_765,
                p50_us: Some(50),
                p90_us: Some(250),
                p99_us: Some(2_500),
                most_us: None,
            }),
            parked: [("record".into(), 3), ("rate".into(), 0), ("change".into(), 12)].into(),
            drops: vec![dropped("drop_over_limit", 1_200, 12.0), dropped("ring_full", 3, 0.0)],
            workers: vec![
                worker(0, 0.42),
                WorkerStatus { heartbeat: None, ..worker(1, 0.0) },
                worker(2, 1.0),
            ],
            stages: [
                (BootStage::Asking, 2),
                (BootStage::Quiet, 1),
                (BootStage::Unrecorded, 1),
                (BootStage::Silent, 1_230),
            ]
            .into(),
            vms: vec![
                asked(1, BootStage::Asking, 3, ("/v1/user-data", 200)),
                limited,
                long,
                unrecorded,
                failing,
                absent,
                VmRow { dialect: Some("ec2,openstack".into()), ..row(9, BootStage::Silent) },
            ],
            matching: 1_234,
        }
    }

    fn page() -> VmPage {
        let request = |ago, path: &str, status| SeenRequest {
            ago,
            method: "GET".into(),
            path: path.into(),
            dialect: "nocloud".into(),
            status,
            bytes: 300,
            us: 120,
        };
        VmPage {
            row: asked(1, BootStage::Asking, 3, ("/v1/user-data", 200)),
            record: Some("file/web-1.yaml".into()),
            slot: Some(17),
            hub: Some(0),
            program: Some("xdp".into()),
            held: Some(GuestUsage { connections: 1, requests: 0 }),
            events: vec![
                serde_json::from_value(
                    serde_json::json!({"id": "drain-1", "kind": "freeze", "state": "started"}),
                )
                .expect("an event"),
            ],
            requests: vec![
                request(0.2, "/v1/user-data", 200),
                request(0.3, "/v1/vendor-data", 503),
                request(1.5, "/v1/meta-data", 200),
            ],
        }
    }

    fn filled() -> Screen {
        let mut screen = Screen::default();
        screen.on_answer(Ok(Documents { top: node(), vm: Some(("52:54:00:00:00:01".into(), vec![page()])) }));
        screen
    }

    /// Compares a screen with its file.
    fn check(name: &str, screen: &Screen, size: (u16, u16), look: TerminalStyle) {
        let (text, file) = (plain(screen, size, look), format!("golden/{name}-{}x{}.txt", size.0, size.1));
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(&file);
        if std::env::var_os("XDP_IMDS_WRITE_SCREENS").is_some() {
            std::fs::write(&path, &text).expect("a file");
        }
        let expected = std::fs::read_to_string(&path).expect("a screen");
        assert!(text == expected, "{file} differs; XDP_IMDS_WRITE_SCREENS=1 writes it again. Now:\n{text}");
        assert!(
            text.lines().count() <= size.1.into()
                && text.lines().all(|line| line.chars().count() <= size.0.into())
        );
    }

    fn key(code: KeyCode) -> KeyEvent {
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    #[test]
    fn what_a_vm_waits_for_is_whole_on_a_narrow_terminal() {
        let mut screen = filled();
        let mut waiting = page();
        waiting.row = row(8, BootStage::Unattached);
        waiting.row.waits_for = Some("no such interface yet; it is attached as soon as it appears".into());
        let shown = waiting.row.mac.clone();
        screen.on_answer(Ok(Documents { top: node(), vm: Some((shown.clone(), vec![waiting])) }));
        screen.shown = ScreenContent::Vm(shown);
        let text = plain(&screen, (50, 24), ASCII);
        let words: Vec<_> = text.split_whitespace().collect();
        assert!(
            words.join(" ").contains("no such interface yet; it is attached as soon as it appears"),
            "{text}"
        );
    }

    #[test]
    fn screens_are_as_in_their_files() {
        for size in [(80, 24), (120, 40), (200, 50)] {
            check("node", &filled(), size, ASCII);
            check(
                "vm",
                &Screen { shown: ScreenContent::Vm("52:54:00:00:00:01".into()), ..filled() },
                size,
                ASCII,
            );
        }
        check("node-unicode", &filled(), (80, 24), UNICODE);
        check("help", &Screen { shown: ScreenContent::Help, ..filled() }, (80, 24), ASCII);
        check("filter", &Screen { typed: Some("web".into()), ..filled() }, (80, 24), ASCII);
        check("first", &Screen::default(), (80, 24), ASCII);
        let away = || Err("no agent runs with the run directory /run/xdp-imds".to_owned());
        let mut screen = filled();
        screen.on_answer(away());
        check("away", &screen, (80, 24), ASCII);
        let mut screen = Screen::default();
        screen.on_answer(away());
        check("away-first", &screen, (80, 24), ASCII);
    }

    #[test]
    fn a_screen_of_any_size_can_be_drawn() {
        let small = (0..=20).flat_map(|width| (0..=16).map(move |height| (width, height)));
        for (width, height) in small.chain([(39, 9), (79, 23), (300, 100), (9, 60)]) {
            for shown in
                [ScreenContent::Node, ScreenContent::Vm("52:54:00:00:00:01".into()), ScreenContent::Help]
            {
                let text = plain(&Screen { shown, ..filled() }, (width, height), ASCII);
                assert!(text.lines().count() <= usize::from(height.max(1)), "{width}x{height}:\n{text}");
            }
        }
    }

    #[test]
    fn what_a_guest_names_cannot_control_the_terminal() {
        let mut screen = filled();
        if let Some(documents) = &mut screen.documents {
            let hostile = |text: &str| Some(text.to_owned());
            (documents.top.vms[0].path, documents.top.vms[0].vm) =
                (hostile("/\x1b[2J\u{7}x"), hostile("a\u{9b}2J\u{202e}b"));
        }
        let text = plain(&screen, (120, 40), UNICODE);
        assert!(text.contains("/?[2J?x") && text.contains("a?2J?b"), "{text}");
        let controls = |c: char| c.is_control() && c != '\n' || matches!(c, '\u{202a}'..='\u{202e}');
        assert!(!text.contains(controls), "{text:?}");
    }

    #[test]
    fn without_colour_every_cell_has_the_colours_of_the_terminal() {
        let coloured = |look: TerminalStyle| {
            let mut terminal = Terminal::new(TestBackend::new(120, 40)).expect("a terminal");
            terminal.draw(|frame| draw::draw(&filled(), look, frame.buffer_mut())).expect("drawn");
            let cells = terminal.backend().buffer().content.iter();
            cells.filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count()
        };
        assert_eq!((coloured(ASCII), coloured(UNICODE)), (0, 0));
        assert!(coloured(COLOUR) > 0);
        assert_eq!(
            plain(&filled(), (120, 40), COLOUR),
            plain(&filled(), (120, 40), UNICODE),
            "the words are the same"
        );
    }

    #[test]
    fn keys_do_what_the_help_says() {
        let mut screen = filled();
        for (code, reaction, selected) in [
            (KeyCode::Down, KeyAction::Draw, 1),
            (KeyCode::Char('j'), KeyAction::Draw, 2),
            (KeyCode::Up, KeyAction::Draw, 1),
            (KeyCode::End, KeyAction::Draw, 6),
            (KeyCode::PageDown, KeyAction::Draw, 6),
            (KeyCode::PageUp, KeyAction::Draw, 0),
            (KeyCode::Char('x'), KeyAction::Nothing, 0),
            (KeyCode::Char('s'), KeyAction::Ask, 0),
        ] {
            assert_eq!((screen.on_key(key(code)), screen.selected), (reaction, selected), "{code:?}");
        }
        assert_eq!(screen.query.sort, VmOrder::Requests);
        for (code, shown) in [
            (KeyCode::Enter, ScreenContent::Vm("52:54:00:00:00:01".into())),
            (KeyCode::Esc, ScreenContent::Node),
            (KeyCode::Char('?'), ScreenContent::Help),
            (KeyCode::Char('q'), ScreenContent::Node),
            (KeyCode::Char('?'), ScreenContent::Help),
            (KeyCode::Char('?'), ScreenContent::Node),
        ] {
            screen.on_key(key(code));
            assert_eq!(screen.shown, shown, "after {code:?}");
        }
        assert_eq!(screen.on_key(key(KeyCode::Char('q'))), KeyAction::Quit);
        assert_eq!(
            screen.on_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)),
            KeyAction::Interrupt
        );
    }

    #[test]
    fn a_filter_applies_when_it_is_entered_and_escape_removes_it() {
        let mut screen = filled();
        for (code, typed, filter) in [
            (KeyCode::Char('/'), Some(""), ""),
            (KeyCode::Char('q'), Some("q"), ""),
            (KeyCode::Backspace, Some(""), ""),
            (KeyCode::Char('e'), Some("e"), ""),
            (KeyCode::Enter, None, "e"),
            (KeyCode::Char('/'), Some("e"), "e"),
            (KeyCode::Esc, None, "e"),
            (KeyCode::Esc, None, ""),
        ] {
            screen.on_key(key(code));
            assert_eq!((screen.typed.as_deref(), &*screen.query.filter), (typed, filter), "after {code:?}");
        }
    }

    #[test]
    fn the_view_asks_for_what_it_shows() {
        let query = TopQuery { sort: VmOrder::Name, filter: "web".into(), ..TopQuery::default() };
        let mut screen = Screen::new(query.clone());
        let node = TopQuery { limit: Some(LISTED), ..query };
        assert_eq!(screen.asked(), ViewQuery { node: node.clone(), vm: None });
        screen.shown = ScreenContent::Vm("web 1".into());
        let vm = TopQuery { guest: Some("web 1".into()), ..TopQuery::default() };
        assert_eq!(vm.path(), "/v1/top?sort=newest&guest=web+1");
        assert_eq!(node.path(), "/v1/top?sort=name&limit=256&filter=web");
        assert_eq!(screen.asked(), ViewQuery { node, vm: Some(vm) });
    }

    #[test]
    fn the_selection_stays_on_its_vm() {
        let mut screen = filled();
        screen.select(2);
        let chosen = screen.chosen().cloned().expect("a VM");
        let mut top = node();
        top.vms.insert(0, asked(4, BootStage::Asking, 1, ("/", 200)));
        screen.on_answer(Ok(Documents { top, vm: None }));
        assert_eq!((screen.selected, screen.chosen()), (3, Some(&chosen)));
        screen.on_answer(Ok(Documents { top: Top { vms: vec![chosen], ..node() }, vm: None }));
        assert_eq!(screen.selected, 0, "the list is shorter now");
    }

    #[test]
    fn a_lost_agent_leaves_the_old_figures_and_an_answer_ends_the_notice() {
        let mut screen = filled();
        screen.on_answer(Err("gone".into()));
        assert!(screen.top().is_some() && screen.away.as_deref() == Some("gone"));
        screen.on_answer(Ok(Documents::default()));
        assert_eq!(screen.away, None);
    }

    #[test]
    fn the_title_says_that_the_agent_is_away_until_it_answers_again() {
        let title =
            |screen: &Screen| plain(screen, (80, 24), ASCII).lines().next().unwrap_or_default().to_owned();
        let mut screen = Screen::default();
        screen.on_answer(Err("gone".into()));
        assert_eq!(title(&screen), "xdp-imds: away");
        for _ in 0..2 {
            screen.on_answer(Ok(Documents { top: node(), vm: None }));
            assert_eq!(title(&screen), "xdp-imds 0.1.0 on hv-1: serving, up 3 h, 1 problem");
            screen.on_answer(Err("gone".into()));
            assert_eq!(title(&screen), "xdp-imds 0.1.0 on hv-1: away, the figures are old");
        }
    }

    #[test]
    fn names_have_the_width_that_there_is_and_paths_stay_in_view() {
        let named = |name: &str, path: &str| {
            let vm = VmRow { vm: Some(name.into()), ..asked(1, BootStage::Asking, 3, (path, 200)) };
            let mut screen = Screen::default();
            screen.on_answer(Ok(Documents { top: Top { vms: vec![vm], ..node() }, vm: None }));
            screen
        };
        let (name, path) =
            ("prod-payments-api-7c9f8d-eu-central-1b", "/latest/meta-data/iam/security-credentials/");
        for (size, names, paths) in [
            ((80, 24), ["prod-payments", "/v1/x"], ["prod-payment~-central-1b", "/latest/~ntials/"]),
            ((120, 40), [name, "/v1/x"], [name, "/latest/met~edentials/"]),
            ((200, 50), [name, "/v1/x"], [name, path]),
        ] {
            for (shown, path) in [(names, "/v1/x"), (paths, path)] {
                let text = plain(&named(name, path), size, ASCII);
                for part in shown {
                    assert!(text.contains(part), "{part} at {size:?}:\n{text}");
                }
            }
        }
    }

    #[test]
    fn the_selected_vm_is_in_view_in_a_long_list() {
        let mut screen = filled();
        let vms =
            (0..200).map(|number| VmRow { vm: Some(format!("vm-{number}")), ..VmRow::default() }).collect();
        screen.on_answer(Ok(Documents { top: Top { vms, ..node() }, vm: None }));
        screen.select(150);
        let text = plain(&screen, (80, 24), ASCII);
        assert!(text.contains("vm-150 ") && !text.contains("vm-151 "), "{text}");
    }

    #[test]
    fn a_printed_screen_has_neither_keys_nor_the_empty_lines_before_them() {
        let text = printed(&filled(), (80, 60), ASCII);
        assert!(text.contains("web-9") && !text.contains("q quit") && !text.contains("\n\n\n"), "{text}");
        let mut away = filled();
        away.on_answer(Err("no agent".into()));
        let text = printed(&away, (80, 60), ASCII);
        assert!(text.ends_with("The agent is away: no agent\n") && !text.contains("\n\n\n"), "{text}");
    }

    #[test]
    fn documents_survive_json() {
        let json = serde_json::to_string(&(node(), page())).expect("JSON");
        let (top, vm): (Top, VmPage) = serde_json::from_str(&json).expect("documents");
        assert_eq!((top, vm), (node(), page()));
    }
}
