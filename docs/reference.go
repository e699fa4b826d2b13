//go:build ignore

// Reference writes kinds.md from the definitions of kinds and rest.md from the OpenAPI document. It is run in docs by generate.sh.
package main

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

func main() {
	for file, write := range map[string]func() ([]byte, error){"kinds.md": kinds, "rest.md": rest} {
		text, err := write()
		if err == nil {
			err = os.WriteFile(file, text, 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "reference:", err)
			os.Exit(1)
		}
	}
}

// cell is a text in a cell of a table.
func cell(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "*", `\*`, "_", `\_`).Replace(text)
}

// schema is what the pages show of a JSON schema.
type schema struct {
	Ref                  string            `json:"$ref"`
	Type                 string            `json:"type"`
	Format               string            `json:"format"`
	Description          string            `json:"description"`
	Default              any               `json:"default"`
	Enum                 []any             `json:"enum"`
	Required             []string          `json:"required"`
	Properties           map[string]schema `json:"properties"`
	Items                *schema           `json:"items"`
	AllOf                []schema          `json:"allOf"`
	OneOf                []schema          `json:"oneOf"`
	AdditionalProperties any               `json:"additionalProperties"`
	IntOrString          bool              `json:"x-kubernetes-int-or-string"`
}

// kind names the type of a value.
func (s schema) kind() string {
	switch {
	case s.Ref != "":
		name := s.Ref[strings.LastIndex(s.Ref, "/")+1:]
		return "[" + name + "](#" + strings.ToLower(name) + ")"
	case s.Type == "array" && s.Items != nil:
		return "list of " + s.Items.kind()
	case s.IntOrString:
		return "integer or string"
	case len(s.AllOf) == 1:
		return s.AllOf[0].kind()
	case len(s.OneOf) > 0:
		var all []string
		for _, one := range s.OneOf {
			all = append(all, one.kind())
		}
		return strings.Join(all, " or ")
	case s.Type == "object" && s.Properties == nil && s.AdditionalProperties != nil:
		return "map"
	case s.Format != "" && s.Type == "string":
		return s.Format
	}
	return cmp.Or(s.Type, "any")
}

// remarks are the description with the default and the values that are allowed.
func (s schema) remarks(required bool) string {
	var parts []string
	if required {
		parts = append(parts, "Required.")
	}
	if s.Description != "" {
		parts = append(parts, cell(s.Description))
	}
	if len(s.Enum) > 0 {
		var values []string
		for _, v := range s.Enum {
			values = append(values, fmt.Sprintf("`%v`", v))
		}
		parts = append(parts, "One of "+strings.Join(values, ", ")+".")
	}
	if s.Default != nil {
		parts = append(parts, fmt.Sprintf("Default `%v`.", s.Default))
	}
	return strings.Join(parts, " ")
}

type definition struct {
	Spec struct {
		Group string `json:"group"`
		Names struct {
			Kind       string   `json:"kind"`
			Plural     string   `json:"plural"`
			ShortNames []string `json:"shortNames"`
		} `json:"names"`
		Scope    string `json:"scope"`
		Versions []struct {
			Name   string `json:"name"`
			Schema struct {
				OpenAPIV3Schema schema `json:"openAPIV3Schema"`
			} `json:"schema"`
		} `json:"versions"`
	} `json:"spec"`
}

func kinds() ([]byte, error) {
	var w bytes.Buffer
	fmt.Fprint(&w, "# Kinds\n\nWritten by docs/generate.sh; do not edit.\n\nThe objects of the Kubernetes API, and their fields. Fields of Kubernetes' own types, such as those of a Pod specification, are left out;\n"+
		"[Sandboxes](sandboxes.md) lists those that take effect. `kubectl explain KIND.FIELD` shows the same and these. `FIELD[]` is a list.\n\n")
	files, err := filepath.Glob("../api/crds/*.yaml")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var d definition
		if err := yaml.Unmarshal(text, &d); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		names := d.Spec.Names
		for _, v := range d.Spec.Versions {
			fmt.Fprintf(&w, "## %s\n\n`apiVersion: %s/%s`, resource `%s`", names.Kind, d.Spec.Group, v.Name, names.Plural)
			if len(names.ShortNames) > 0 {
				fmt.Fprintf(&w, ", short `%s`", strings.Join(names.ShortNames, "`, `"))
			}
			root := v.Schema.OpenAPIV3Schema
			fmt.Fprintf(&w, ". %s.\n\n%s\n\n| Field | Type | Description |\n|---|---|---|\n", d.Spec.Scope, cell(root.Description))
			for _, part := range []string{"spec", "status"} {
				writeFields(&w, part, root.Properties[part])
			}
			fmt.Fprintln(&w)
		}
	}
	return w.Bytes(), nil
}

// writeFields writes a row for each property with a description. What has none is Kubernetes', whose texts api/generate.sh removes.
func writeFields(w *bytes.Buffer, path string, s schema) {
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		p := s.Properties[name]
		inner, at := p, path+"."+name
		if p.Items != nil {
			inner = *p.Items
			at += "[]"
		}
		if p.Description == "" {
			continue
		}
		fmt.Fprintf(w, "| `%s` | %s | %s |\n", at, p.kind(), p.remarks(slices.Contains(s.Required, name)))
		if name != "conditions" {
			writeFields(w, at, inner)
		}
	}
}

type content map[string]struct {
	Schema schema `json:"schema"`
}

type parameter struct {
	Ref         string `json:"$ref"`
	Name        string `json:"name"`
	In          string `json:"in"`
	Required    bool   `json:"required"`
	Description string `json:"description"`
	Schema      schema `json:"schema"`
}

type route struct {
	OperationID string      `json:"operationId"`
	Summary     string      `json:"summary"`
	Description string      `json:"description"`
	Parameters  []parameter `json:"parameters"`
	RequestBody struct {
		Required bool    `json:"required"`
		Content  content `json:"content"`
	} `json:"requestBody"`
	Responses map[string]struct {
		Description string  `json:"description"`
		Content     content `json:"content"`
	} `json:"responses"`
}

type api struct {
	Info struct {
		Description string `json:"description"`
	} `json:"info"`
	Paths map[string]struct {
		Get, Post, Put, Patch, Delete *route
		Parameters                    []parameter `json:"parameters"`
	} `json:"paths"`
	Components struct {
		Parameters map[string]parameter `json:"parameters"`
		Schemas    map[string]schema    `json:"schemas"`
	} `json:"components"`
}

func rest() ([]byte, error) {
	const file = "../internal/edge/e2b/api/openapi.yaml"
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var a api
	if err := yaml.Unmarshal(text, &a); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var w bytes.Buffer
	fmt.Fprintf(&w, "# REST API\n\nWritten by docs/generate.sh; do not edit.\n\n%s\n\nAn API key goes into the header `X-API-Key`, or as a bearer token into `Authorization`. [Tenants](tenancy.md) has its scopes.\n"+
		"Commands and files in a sandbox are reached by [the gateway](gateway.md).\n\n## Routes\n\n", strings.TrimSpace(a.Info.Description))
	for _, path := range slices.Sorted(maps.Keys(a.Paths)) {
		p := a.Paths[path]
		for _, m := range []struct {
			method string
			route  *route
		}{{"GET", p.Get}, {"POST", p.Post}, {"PUT", p.Put}, {"PATCH", p.Patch}, {"DELETE", p.Delete}} {
			if m.route != nil {
				writeRoute(&w, m.method+" "+path, *m.route, append(p.Parameters, m.route.Parameters...), a.Components.Parameters)
			}
		}
	}
	fmt.Fprint(&w, "## Types\n\n")
	for _, name := range slices.Sorted(maps.Keys(a.Components.Schemas)) {
		writeType(&w, name, a.Components.Schemas[name])
	}
	return w.Bytes(), nil
}

func writeRoute(w *bytes.Buffer, title string, r route, parameters []parameter, shared map[string]parameter) {
	fmt.Fprintf(w, "### %s\n\n", title)
	if about := cmp.Or(r.Description, r.Summary); about != "" {
		fmt.Fprintf(w, "%s\n\n", cell(about))
	}
	for _, p := range parameters {
		if p.Ref != "" {
			p = shared[p.Ref[strings.LastIndex(p.Ref, "/")+1:]]
		}
		p.Schema.Description = cmp.Or(p.Description, p.Schema.Description)
		about := p.In + " `" + p.Name + "`, " + p.Schema.kind() + ". " + p.Schema.remarks(p.Required && p.In != "path")
		fmt.Fprintf(w, "- %s\n", strings.TrimSpace(about))
	}
	for _, kind := range slices.Sorted(maps.Keys(r.RequestBody.Content)) {
		body := r.RequestBody.Content[kind].Schema
		fmt.Fprintf(w, "- body `%s`: %s", kind, body.kind())
		if fields := slices.Sorted(maps.Keys(body.Properties)); len(fields) > 0 {
			fmt.Fprintf(w, " of `%s`", strings.Join(fields, "`, `"))
		}
		fmt.Fprintln(w)
	}
	for _, status := range slices.Sorted(maps.Keys(r.Responses)) {
		if status == "default" {
			continue // each route has the same error
		}
		answer := r.Responses[status]
		fmt.Fprintf(w, "- %s: %s", status, cell(answer.Description))
		for _, kind := range slices.Sorted(maps.Keys(answer.Content)) {
			fmt.Fprintf(w, " `%s`: %s", kind, answer.Content[kind].Schema.kind())
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
}

func writeType(w *bytes.Buffer, name string, s schema) {
	fmt.Fprintf(w, "### %s\n\n", name)
	if about := s.remarks(false); about != "" {
		fmt.Fprintf(w, "%s\n\n", about)
	}
	if s.Properties == nil && s.AllOf == nil {
		fmt.Fprintf(w, "Is %s.\n\n", s.kind())
		return
	}
	for _, part := range s.AllOf {
		if part.Ref != "" {
			fmt.Fprintf(w, "Has the fields of %s, too.\n\n", part.kind())
			continue
		}
		s.Properties, s.Required = part.Properties, part.Required
	}
	if len(s.Properties) == 0 {
		return
	}
	fmt.Fprint(w, "| Field | Type | Description |\n|---|---|---|\n")
	for _, field := range slices.Sorted(maps.Keys(s.Properties)) {
		p := s.Properties[field]
		fmt.Fprintf(w, "| `%s` | %s | %s |\n", field, p.kind(), p.remarks(slices.Contains(s.Required, field)))
	}
	fmt.Fprintln(w)
}
