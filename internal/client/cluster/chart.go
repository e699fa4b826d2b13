package cluster

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig/v3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/api/crds"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
	"github.com/barchan-dev/barchan/packaging/chart"
)

const (
	// ReleaseName is the name of the release, in Helm's terms.
	ReleaseName = "barchan"
	// DefaultNamespace has the roles of a cluster, and templates for all tenants.
	DefaultNamespace = "barchan-system"
	// managedBy is the label of who has installed an object. Helm sets its own name.
	managedBy   = "app.kubernetes.io/managed-by"
	managedByUs = "barchan"
	helmHook    = "helm.sh/hook"
	// partOf is the label of all objects of the chart, however they were installed.
	partOf   = "app.kubernetes.io/part-of"
	partOfUs = "barchan"
)

// Values are those of the chart; values.yaml in it describes them.
type Values = map[string]any

// Release is what the chart is rendered for.
type Release struct {
	Namespace string
	Version   string // of this program
}

// chartFiles are the files of the chart by their paths in it, with the definitions of our kinds.
type chartFiles map[string][]byte

func readChart(version string) (chartFiles, error) {
	files := chartFiles{}
	add := func(from fs.FS, root, below string) error {
		return fs.WalkDir(from, root, func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			files[path.Join(below, strings.TrimPrefix(strings.TrimPrefix(name, root), "/"))], err = fs.ReadFile(from, name)
			return err
		})
	}
	// Helm would never upgrade what is in the directory crds.
	if err := errors.Join(add(chart.Files, ReleaseName, ""), add(crds.Files, ".", "definitions")); err != nil {
		return nil, fmt.Errorf("read the chart: %w", err)
	}
	const metadata = "Chart.yaml"
	files[metadata] = bytes.ReplaceAll(files[metadata], []byte("appVersion: 0.0.0"), []byte("appVersion: "+fmt.Sprintf("%q", version)))
	files[metadata] = bytes.ReplaceAll(files[metadata], []byte("\nversion: 0.0.0"), []byte("\nversion: "+semantic(version)))
	return files, nil
}

// semantic returns a version that Helm accepts: one of a commit without tag comes before the first release.
func semantic(version string) string {
	version = strings.TrimPrefix(version, "v")
	switch {
	case version == "":
		return "0.0.0"
	case version[0] >= '0' && version[0] <= '9' && strings.Count(version, ".") >= 2:
		return version
	default:
		return "0.0.0-" + strings.Trim(strings.Map(func(r rune) rune {
			if r == '-' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
				return r
			}
			return '-'
		}, version), "-")
	}
}

// WriteChart writes the chart as an archive, barchan-VERSION.tgz, into a directory, and returns its path. The same version makes
// the same archive.
func WriteChart(version, dir string) (string, error) {
	files, err := readChart(version)
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	w := tar.NewWriter(zip)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: path.Join(ReleaseName, name), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(files[name]))}))
		_, written := w.Write(files[name])
		err = errors.Join(err, written)
	}
	file := filepath.Join(dir, ReleaseName+"-"+semantic(version)+".tgz")
	if err = errors.Join(err, w.Close(), zip.Close()); err == nil {
		err = os.WriteFile(file, out.Bytes(), 0o644) //nolint:gosec // it has no secret
	}
	if err != nil {
		return "", fmt.Errorf("write the chart: %w", err)
	}
	return file, nil
}

// DefaultValues returns values.yaml, with its comments.
func DefaultValues() ([]byte, error) { return fs.ReadFile(chart.Files, ReleaseName+"/values.yaml") }

// Glob returns the files that a pattern matches, for templates.
func (f chartFiles) Glob(pattern string) map[string][]byte {
	found := map[string][]byte{}
	for name, data := range f {
		if ok, _ := path.Match(pattern, name); ok {
			found[name] = data
		}
	}
	return found
}

// Get returns the text of a file, and nothing for one that is missing, for templates.
func (f chartFiles) Get(name string) string { return string(f[name]) }

// Render returns the objects of the chart for values, which may lack what has a default, without Helm's hooks. Definitions of kinds
// come first. The error is an errs.ErrInvalid that names the value.
//
// Templates have the functions of Helm that the chart uses. Helm's own packages would add 12 MiB to the memory of every process of
// this program; a test compares the results.
func Render(r Release, values Values) ([]*unstructured.Unstructured, error) {
	files, err := readChart(r.Version)
	if err != nil {
		return nil, err
	}
	var known Values
	metadata := struct{ Name, Version, AppVersion string }{}
	if err := errors.Join(yaml.Unmarshal(files["values.yaml"], &known), yaml.Unmarshal(files["Chart.yaml"], &metadata)); err != nil {
		return nil, fmt.Errorf("read the chart: %w", err)
	}
	if err := checkKeys("", values, known); err != nil {
		return nil, err
	}
	templates, err := parse(files)
	if err != nil {
		return nil, err
	}
	root := Values{
		"Values": Merge(known, values), "Chart": metadata, "Files": files,
		"Release": Values{"Name": ReleaseName, "Namespace": r.Namespace, "Service": managedByUs},
	}
	var list []*unstructured.Unstructured
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if ok, _ := path.Match("templates/*.yaml", name); !ok {
			continue
		}
		var text bytes.Buffer
		if err := templates.ExecuteTemplate(&text, name, root); err != nil {
			if missing, ok := errors.AsType[missingValue](err); ok {
				err = missing
			}
			return nil, fmt.Errorf("values: %w: %w", err, errs.ErrInvalid)
		}
		objects, err := kubeobjects.Decode(&text)
		if err != nil {
			return nil, fmt.Errorf("values: %s: %w", name, err)
		}
		list = append(list, objects...)
	}
	list = slices.DeleteFunc(list, func(u *unstructured.Unstructured) bool { return u.GetAnnotations()[helmHook] != "" })
	slices.SortStableFunc(list, func(a, b *unstructured.Unstructured) int { return rank(a) - rank(b) })
	return list, nil
}

// missingValue says which value the chart requires.
type missingValue string

func (m missingValue) Error() string { return string(m) }

// parse parses the templates, each by its path in the chart.
func parse(files chartFiles) (*template.Template, error) {
	all := template.New(ReleaseName).Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	functions["include"] = func(name string, data any) (string, error) {
		var text strings.Builder
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	functions["required"] = func(message string, value any) (any, error) {
		if value == nil || value == "" {
			return nil, missingValue(message)
		}
		return value, nil
	}
	functions["toYaml"] = func(v any) (string, error) {
		text, err := yaml.Marshal(v)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	functions["fromYaml"] = func(text string) (v Values, err error) { return v, yaml.Unmarshal([]byte(text), &v) }
	functions["lookup"] = func(...string) Values { return nil } // nothing of the cluster, as in `helm template`
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasPrefix(name, "templates/") {
			continue
		}
		if _, err := all.New(name).Funcs(functions).Parse(string(files[name])); err != nil {
			return nil, fmt.Errorf("read the chart: %w", err)
		}
	}
	return all, nil
}

// checkKeys refuses values that the chart does not have, such as misspelt ones. A value that is empty in the chart may have any content.
func checkKeys(at string, given, known Values) error {
	for _, key := range slices.Sorted(maps.Keys(given)) {
		value, ok := known[key]
		if !ok {
			return fmt.Errorf("value %s%s: the chart has none of this name; `barchan cluster values` lists them: %w", at, key, errs.ErrInvalid)
		}
		inner, isMap := value.(Values)
		if !isMap || len(inner) == 0 {
			continue
		}
		below, ok := given[key].(Values)
		if !ok {
			return fmt.Errorf("value %s%s: want %s below it: %w", at, key, strings.Join(slices.Sorted(maps.Keys(inner)), ", "), errs.ErrInvalid)
		}
		if err := checkKeys(at+key+".", below, inner); err != nil {
			return err
		}
	}
	return nil
}

// rank orders objects for their creation: an object after those that it needs.
func rank(u *unstructured.Unstructured) int {
	switch u.GetKind() {
	case kindCRD:
		return 0
	case "ServiceAccount", "ClusterRole", "Role":
		return 1
	case "Deployment":
		return 3
	default:
		return 2
	}
}
