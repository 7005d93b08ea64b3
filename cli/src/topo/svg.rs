//! Draws devices above and NICs below, with lines between them in the colour of their distance. A
//! table beneath repeats the distances.

use std::fmt::Write;

use hmem::p2p::topology::{BusId, Distance, PciPath, Redirection, Topology};

use super::report::{nic_functions, nic_names};
use crate::table::list_or;

/// Horizontal distance from one device or NIC to the next, in pixels.
const PITCH: usize = 108;
/// Width and height of the box of a device or NIC, in pixels.
const BOX: (usize, usize) = (96, 46);
const MARGIN: usize = 28;
/// Vertical position of the legend, in pixels. `DEVICES` and `NICS` are the vertical positions of
/// the two rows of boxes.
const LEGEND: usize = 74;
const DEVICES: usize = 158;
const NICS: usize = 474;
/// Width and height of a cell of the table, in pixels.
const CELL: (usize, usize) = (66, 24);
/// Width of the first column of the table, in pixels.
const HEADS: usize = 104;
/// Minimum width of the picture, in pixels.
const NARROWEST: usize = 760;

/// Returns the colour and the width of lines of a distance, and the colour of text on that colour.
/// The colours of distances differ in every common form of colour blindness.
const fn colors(distance: Distance) -> (&'static str, &'static str, &'static str) {
    match distance {
        Distance::Same => ("#444444", "1", "#ffffff"),
        Distance::Pix => ("#00796b", "4.5", "#ffffff"),
        Distance::Pxb => ("#1e88e5", "3.5", "#ffffff"),
        Distance::Phb => ("#f9a825", "2.5", "#000000"),
        Distance::Node => ("#d1495b", "1.5", "#ffffff"),
        Distance::Sys => ("#c4c8cf", "0.8", "#000000"),
    }
}

/// A device or NIC, drawn as a box. The lines of the picture connect devices with NICs.
struct End {
    id: BusId,
    title: String,
    /// The NUMA node; `None` if unknown.
    node: Option<u32>,
}

/// The picture as far as it is drawn.
struct Picture {
    /// The SVG elements.
    text: String,
    /// Width of the picture, in pixels.
    width: usize,
}

/// Draws the accelerators and NICs of a topology.
pub(super) fn draw(topology: &Topology) -> String {
    let mut devices: Vec<_> = topology.accelerators().map(|device| device.bus_id).collect();
    let mut nics = nic_functions(topology);
    let node = |id: BusId| topology.device(id).and_then(|device| device.numa_node);
    let place = |id: &BusId| (node(*id).unwrap_or(u32::MAX), *id);
    devices.sort_by_key(place);
    nics.sort_by_key(place);
    let device = |id| {
        let device = topology.device(id);
        let vendor = device.and_then(|device| device.vendor_name()).unwrap_or("device");
        let is_gpu = device.is_some_and(|device| device.class >> 16 == 0x03);
        let kind = if is_gpu { " GPU" } else { "" };
        End { id, title: format!("{vendor}{kind}"), node: node(id) }
    };
    let devices: Vec<_> = devices.into_iter().map(device).collect();
    let nic = |id| End { id, title: nic_names(topology, id).join(", "), node: node(id) };
    let nics: Vec<_> = nics.into_iter().map(nic).collect();
    let columns = devices.len().max(nics.len());
    let table = HEADS + nics.len() * CELL.0;
    let width = NARROWEST.max(2 * MARGIN + columns * PITCH).max(2 * MARGIN + table);
    let below = NICS + BOX.1 + 84;
    let pairs = !devices.is_empty() && !nics.is_empty();
    let height =
        if pairs { below + (devices.len() + 1) * CELL.1 + MARGIN } else { DEVICES + BOX.1 + 84 };
    let mut picture = Picture { text: String::new(), width };
    picture.put(format_args!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" \
         font-family=\"DejaVu Sans, Verdana, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"
    ));
    picture.heading(topology);
    if !pairs {
        let missing = match (devices.is_empty(), nics.is_empty()) {
            (true, true) => "no GPU or accelerator, and no RDMA NIC with a PCI address",
            (true, false) => "no GPU or accelerator: there is no pair to draw",
            _ => "no RDMA NIC with a PCI address: there is no pair to draw",
        };
        picture.text(MARGIN, LEGEND + 8, "start", "#b00020", missing);
        picture.row(if devices.is_empty() { &nics } else { &devices }, DEVICES, true);
        picture.text.push_str("</svg>\n");
        return picture.text;
    }
    picture.legend();
    let path = |device: &End, nic: &End| topology.path(device.id, nic.id);
    let mut lines: Vec<(usize, usize, PciPath)> = Vec::new();
    for (from, device) in devices.iter().enumerate() {
        lines.extend(
            nics.iter().enumerate().filter_map(|(to, nic)| Some((from, to, path(device, nic)?))),
        );
    }
    // Lines of near pairs are drawn last, on top of the others.
    lines.sort_by_key(|(_, _, path)| std::cmp::Reverse(path.distance));
    for (from, to, path) in &lines {
        picture.line(picture.centre(*from, devices.len()), picture.centre(*to, nics.len()), path);
    }
    picture.row(&devices, DEVICES, true);
    picture.row(&nics, NICS, false);
    picture.table(topology, &devices, &nics, below);
    picture.text.push_str("</svg>\n");
    picture.text
}

/// Escapes a text for SVG.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Shortens a text to at most `most` characters.
fn short(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['\u{2026}']).collect()
}

impl Picture {
    /// Adds a line to the SVG elements.
    fn put(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.text.write_fmt(line);
        self.text.push('\n');
    }

    fn text(&mut self, x: usize, y: usize, anchor: &str, fill: &str, text: &str) {
        let text = escaped(text);
        self.put(format_args!(
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"{fill}\">{text}</text>"
        ));
    }

    /// Returns the horizontal centre of box `at` in a centred row of `count` boxes.
    fn centre(&self, at: usize, count: usize) -> usize {
        (self.width - count * PITCH) / 2 + at * PITCH + PITCH / 2
    }

    fn heading(&mut self, topology: &Topology) {
        let kernel = topology.kernel().release.as_deref().unwrap_or("unknown");
        let peer: Vec<_> = topology.kernel().peer_memory().collect();
        let peer = list_or("none", &peer);
        self.put(format_args!(
            "<text x=\"{MARGIN}\" y=\"34\" font-size=\"18\" font-weight=\"bold\" \
             fill=\"#111111\">Devices and NICs by PCIe distance</text>"
        ));
        let facts =
            format!("kernel {kernel}, IOMMU {}, peer-memory modules: {peer}", topology.iommu());
        self.text(MARGIN, 54, "start", "#444444", &facts);
    }

    fn legend(&mut self) {
        let mut x = MARGIN;
        let mut y = LEGEND;
        for distance in Distance::ALL.into_iter().skip(1) {
            let (color, width, _) = colors(distance);
            let label = format!("{}: {}", distance.name(), distance.meaning());
            let room = 44 + label.chars().count() * 7 + 18;
            if x > MARGIN && x + room > self.width - MARGIN {
                x = MARGIN;
                y += 18;
            }
            self.put(format_args!(
                "<line x1=\"{x}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"{color}\" \
                 stroke-width=\"{width}\"/>",
                x + 32
            ));
            self.text(x + 38, y + 4, "start", "#222222", &label);
            x += room;
        }
    }

    /// Draws the curve from a device to a NIC. `from` and `to` are their horizontal centres.
    fn line(&mut self, from: usize, to: usize, path: &PciPath) {
        let (color, width, _) = colors(path.distance);
        let (top, bottom) = (DEVICES + BOX.1, NICS);
        let (one, two) = (top + (bottom - top) / 3, bottom - (bottom - top) / 3);
        let redirected = matches!(path.redirection, Redirection::By(_));
        let dash = if redirected { " stroke-dasharray=\"7 4\"" } else { "" };
        self.put(format_args!(
            "<path d=\"M{from} {top} C{from} {one} {to} {two} {to} {bottom}\" fill=\"none\" \
             stroke=\"{color}\" stroke-width=\"{width}\"{dash}/>"
        ));
    }

    /// Draws a row of boxes, with their NUMA nodes above or below.
    fn row(&mut self, ends: &[End], y: usize, above: bool) {
        let (fill, stroke) = if above { ("#e8f5e9", "#2e7d32") } else { ("#e3f2fd", "#1565c0") };
        for (at, end) in ends.iter().enumerate() {
            let centre = self.centre(at, ends.len());
            let x = centre - BOX.0 / 2;
            self.put(format_args!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"6\" fill=\"{fill}\" \
                 stroke=\"{stroke}\"/>",
                BOX.0, BOX.1
            ));
            self.put(format_args!(
                "<text x=\"{centre}\" y=\"{}\" text-anchor=\"middle\" font-weight=\"bold\" \
                 fill=\"#111111\">{}</text>",
                y + 19,
                escaped(&short(&end.title, 13))
            ));
            self.put(format_args!(
                "<text x=\"{centre}\" y=\"{}\" text-anchor=\"middle\" font-size=\"11\" \
                 fill=\"#333333\">{}</text>",
                y + 36,
                end.id
            ));
        }
        let mut at = 0;
        while at < ends.len() {
            let same = ends[at..].iter().take_while(|end| end.node == ends[at].node).count();
            let first = self.centre(at, ends.len()) - BOX.0 / 2;
            let last = self.centre(at + same - 1, ends.len()) + BOX.0 / 2;
            let (line, text) =
                if above { (y - 8, y - 14) } else { (y + BOX.1 + 8, y + BOX.1 + 23) };
            self.put(format_args!(
                "<line x1=\"{first}\" y1=\"{line}\" x2=\"{last}\" y2=\"{line}\" \
                 stroke=\"#777777\" stroke-width=\"2\"/>"
            ));
            let name = match ends[at].node {
                Some(node) => format!("NUMA node {node}"),
                None if same > 1 => "NUMA node unknown".to_owned(),
                None => "node unknown".to_owned(),
            };
            self.text((first + last) / 2, text, "middle", "#444444", &name);
            at += same;
        }
    }

    fn table(&mut self, topology: &Topology, devices: &[End], nics: &[End], y: usize) {
        let left = (self.width - HEADS - nics.len() * CELL.0) / 2;
        let x = |column: usize| left + HEADS + column * CELL.0;
        for (column, nic) in nics.iter().enumerate() {
            self.text(x(column) + CELL.0 / 2, y + 16, "middle", "#111111", &short(&nic.title, 9));
        }
        let mut redirected = false;
        for (row, device) in devices.iter().enumerate() {
            let y = y + (row + 1) * CELL.1;
            self.text(left, y + 16, "start", "#111111", &device.id.to_string());
            for (column, nic) in nics.iter().enumerate() {
                let Some(path) = topology.path(device.id, nic.id) else { continue };
                let (fill, _, ink) = colors(path.distance);
                let by = matches!(path.redirection, Redirection::By(_));
                redirected |= by;
                self.put(format_args!(
                    "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{fill}\" \
                     stroke=\"#ffffff\"/>",
                    x(column),
                    CELL.0,
                    CELL.1
                ));
                let mark = if by { "*" } else { "" };
                let text = format!("{}{mark}", path.distance);
                self.text(x(column) + CELL.0 / 2, y + 16, "middle", ink, &text);
            }
        }
        if redirected {
            let text = "dashed, *: Access Control Services redirect traffic to the root complex";
            self.text(left, y - 8, "start", "#444444", text);
        }
    }
}
